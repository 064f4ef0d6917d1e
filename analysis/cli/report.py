"""`criticalkv report`: a run's report, made again from its rows."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from analysis.cli.options import AsJson, say


def report(run: Annotated[Path, typer.Argument(help="The folder of a finished validation.")], as_json: AsJson = False) -> None:
    """Make the ledger, the figures and the report of a run again, from its Parquet files; no model is loaded.

    Example: [bold]criticalkv report runs/paper[/]
    """
    from analysis.report import remake
    from analysis.report.tables import counted
    from analysis.schema import CLAIMS

    tables = remake(run)
    if as_json:
        say({"folder": run, "report": run / "report.html", "claims": tables[CLAIMS.name]})
        return
    console = Console()
    console.print(counted(tables[CLAIMS.name]))
    console.print(f"Report: {run / 'report.html'} and {run / 'report.md'}", soft_wrap=True, markup=False)
