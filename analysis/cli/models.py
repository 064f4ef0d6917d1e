"""`criticalkv models`: what can be captured, found by running it."""

import dataclasses
import difflib
import json
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from analysis.cli.tables import table
from analysis.errors import InputError


def models(
    family: Annotated[list[str] | None, typer.Argument(help="Model types, such as llama; default: all of them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array, nothing else.")] = False,
) -> None:
    """List every causal-LM family of the installed transformers: is it captured exactly, and which checks passed.

    Each family is built as a tiny random model in float64 and run with capture and without (about a minute for all).

    Example: [bold]criticalkv models llama gemma2 deepseek_v3[/]
    """
    from transformers.utils import logging

    from analysis.experiments.families import MEANING, examine
    from hooks.tiny import families

    logging.set_verbosity_error()
    known = families()
    for name in family or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, 3)
            raise InputError(
                f"no family {name!r} in this transformers" + (f"; did you mean {', '.join(near)}?" if near else "")
            )
    console = Console(stderr=True)
    found = [examine(name) for name in track(family or known, "running tiny models", console=console, transient=True)]
    if as_json:
        typer.echo(json.dumps([{**dataclasses.asdict(status), "checks": status.checks} for status in found]))
        return
    rows = []
    marks = {True: "✓", False: "✗", None: ""}
    for status in found:
        note = status.note or ", ".join(
            words for words, true in (("gated", status.gated), (f"{status.skipped} layers skipped", status.skipped)) if true
        )
        rows.append((status.family, status.status, status.attention, *(marks[c] for c in status.checks.values()), note))
    out = Console()
    columns = ("family", "status", "attention", "logits", "A V", "W_O", "note")
    out.print(table(columns, rows, left=len(columns), fold=columns))
    counts = Counter(status.status for status in found)
    for kind, meaning in MEANING.items():
        if counts[kind]:
            out.print(f"{counts[kind]:4} {kind}: {meaning}")
