"""The report that a run ends with, made from its tables alone. Loads neither torch nor transformers."""

from analysis.report.making import read_validation, remake, write_report
from analysis.report.render import markdown, render
from analysis.report.tables import behaviour_table, ledger_table, perturbation_table

__all__ = [
    "behaviour_table",
    "ledger_table",
    "markdown",
    "perturbation_table",
    "read_validation",
    "remake",
    "render",
    "write_report",
]
