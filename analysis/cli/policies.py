"""`criticalkv policies` and `criticalkv explain`: every eviction policy by name."""

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console

from analysis.cli.options import AsJson, say
from analysis.cli.tables import table
from analysis.errors import InputError


def policies(as_json: Annotated[bool, typer.Option("--json", help="One JSON array, nothing else.")] = False) -> None:
    """List the eviction policies: the bases, what may select on top of each, and those with a name of their own.

    Example: [bold]criticalkv policies[/]
    """
    from eviction.registry import describe, listed, names

    if as_json:
        found = (describe(name) for name in names())
        typer.echo(json.dumps([{**dataclasses.asdict(one), "source": one.source} for one in found], ensure_ascii=False))
        return
    out = Console()
    rows = []
    for one in map(describe, listed()):
        queries = {"all queries of the prompt": "all", "the last query": "1"}.get(one.queries) or one.queries.split()[2]
        rows.append((one.name, one.verbs[1][1], one.verbs[2][1], queries, one.source))
    columns = ("policy", "budget", "selection", "queries", "source")
    out.print(table(columns, rows, left=5, fold=("source",)))
    out.print("queries: how many of the last ones a policy looks at", style="dim")
    out.print(
        f"A selection goes with every base (adakv+two-stage, h2o+norm, …): {len(names())} names. criticalkv explain NAME tells more."
    )


def explain(
    name: Annotated[str, typer.Argument(help="A policy's name, such as adakv+two-stage.")], as_json: AsJson = False
) -> None:
    """Say what a policy does: formula, paper, parameters with their defaults, and what it needs to see.

    Example: [bold]criticalkv explain adakv+two-stage[/]
    """
    from rich.markup import escape

    from eviction.registry import describe

    try:
        found = describe(name)
    except ValueError as error:
        raise InputError(str(error)) from error
    if as_json:
        say({**dataclasses.asdict(found), "source": found.source})
        return
    out = Console(highlight=False)
    out.print(f"[bold]{escape(found.name)}[/], looking at {found.queries}")
    for verb, cls, text, source, parameters in found.verbs:
        out.print(f"\n[bold]{verb}[/] {cls} ({escape(source)})")
        out.print(escape(text))
        for parameter, default in parameters:
            out.print(f"  {parameter} = {escape(default)}")
