"""What a person reads: experiments, tables, figures, the report, the command line. Importing this loads nothing heavy."""
