"""`criticalkv`: one command, a subcommand for each job. A user's mistake is one message and exit code 2."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from analysis.cli.ablate import ablate
from analysis.cli.evaluate import evaluate
from analysis.cli.generate import generate
from analysis.cli.head_scores import head_scores
from analysis.cli.leave_one_out import leave_one_out
from analysis.cli.models import models
from analysis.cli.policies import explain, policies
from analysis.cli.report import report
from analysis.cli.sweep import compare, merge, status, sweep
from analysis.cli.validate import validate
from analysis.errors import InputError

app = typer.Typer(
    name="criticalkv",
    help="What dropping KV-cache entries really does to a model, what the theory promises, and whether the promise holds.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(validate)
app.command()(report)
app.command()(ablate)
app.command()(evaluate)
app.command()(sweep)
app.command()(status)
app.command()(compare)
app.command()(merge)
app.command()(models)
app.command()(policies)
app.command()(explain)
app.command()(head_scores)
app.command()(generate)
app.command()(leave_one_out)


def _version(wanted: bool) -> bool:
    if wanted:
        import importlib.metadata

        typer.echo(importlib.metadata.version("criticalkv"))
        raise typer.Exit
    return wanted


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """What dropping KV-cache entries really does to a model, what the theory promises, and whether the promise holds."""


def main() -> None:
    """Entry point: run the command; turn what a user can mend into a message and exit code 2."""
    try:
        app()
    except InputError as error:
        fail(str(error))
    except Exception as error:
        # imported late: a mistake in a setting is told without loading torch
        if (hooks := sys.modules.get("hooks.errors")) and isinstance(
            error, hooks.ModelUnavailable | hooks.UnsupportedAttention
        ):
            fail(str(error))
        if (selfcheck := sys.modules.get("analysis.experiments.selfcheck")) and isinstance(error, selfcheck.SelfCheckFailed):
            fail(str(error), code=1)
        raise


def fail(message: str, code: int = 2) -> None:
    """Print what is wrong and leave with an exit code: 2 for what the user can mend."""
    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {_escaped(message)}", soft_wrap=True)
    raise SystemExit(code)


def _escaped(message: str) -> str:
    from rich.markup import escape

    return escape(message)
