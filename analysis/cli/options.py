"""Options that several commands have, said once."""

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from analysis.settings import DTYPES, ValidationSettings

VALIDATION = ValidationSettings()
"""Defaults of the commands that measure texts."""

TASK = typer.Option(
    help="Tasks, separated by commas: RULER's (niah_single_1, vt, …; ruler-offline are the eleven that need no data), needle, fidelity, "
    "LongBench's (qasper, …; longbench are all), a file of rows (mine.jsonl), a data set (owner/name:config@split)."
)
Task = Annotated[str | None, TASK]
Lengths = Annotated[str | None, typer.Option("--context-length", help="Tokens of the prompt, one length or several.")]
Samples = Annotated[int | None, typer.Option(help="Samples of each task and length.")]
Policies = Annotated[
    str | None,
    typer.Option(help="What is compared, separated by commas; parameters go behind a colon (snapkv:pooling=none)."),
]
Budgets = Annotated[
    str | None, typer.Option("--budgets", help="Shares of the context's entries (0.2), or entries per KV head (512).")
]
Aware = Annotated[
    bool | None,
    typer.Option(
        "--query-aware/--query-agnostic", help="Whether policies see the question; else the context is compressed before."
    ),
]
Data = Annotated[str | None, typer.Option(help="What qa_1, qa_2 and LongBench's tasks read: a file, or a data set on the hub.")]
Haystack = Annotated[Path | None, typer.Option(help="A text file to hide needles in; default: Python's documentation.")]
Depths = Annotated[int | None, typer.Option(help="Places of the needle in the task needle, from the start to the end.")]
Metric = Annotated[str | None, typer.Option(help="Score answers so, whatever the task: all, part, exact, f1, rouge-l, …")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Tokens of an answer, in place of the task's own.")]
Judge = Annotated[
    int | None, typer.Option(help="Queries of each answer whose attention outputs are compared exactly; 0 for none.")
]
Raw = Annotated[bool | None, typer.Option("--raw", help="Give prompts as they are, without the model's chat template.")]
Use = Annotated[
    Path | None, typer.Option("--import", help="A Python file of yours that registers tasks or policies; it is run.")
]
Seeds = Annotated[str | None, typer.Option("--seed", help="Of what is drawn, one or several.")]
Device = Annotated[str | None, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, …")]
Dtype = Annotated[str | None, typer.Option(help=f"Of the model's weights: one of {', '.join(DTYPES)}.")]

# of the commands that measure texts: validate, ablate
Model = Annotated[str, typer.Option(help="A Hugging Face id, a folder, or the reference model.")]
Context = Annotated[
    list[Path] | None,
    typer.Option(help="A text file to measure on; repeat for more. Default: passages of Python's documentation."),
]
Passages = Annotated[int, typer.Option(help="How many of those passages, where no --context is given.")]
ContextLength = Annotated[int, typer.Option(help="Tokens of each context, at most.")]
Window = Annotated[int, typer.Option(help="Last queries that choose, and entries always kept.")]
Later = Annotated[int, typer.Option(help="Tokens decoded after the first, to judge on.")]
PassageSeed = Annotated[int, typer.Option("--seed", help="Chooses the passages.")]
OnDevice = Annotated[str, typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1, …")]
InDtype = Annotated[str, typer.Option("--dtype", help=f"Of the model's weights: one of {', '.join(DTYPES)}.")]
Out = Annotated[Path | None, typer.Option(help="Folder for tables, figures and report; new, empty, or of a stopped run.")]

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]


def say(found: Mapping[str, Any]) -> None:
    """Print one JSON object: tables as lists of records, a NaN as null, paths as text."""
    typer.echo(json.dumps({name: _plain(value) for name, value in found.items()}, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    """What JSON can hold."""
    if hasattr(value, "to_json"):
        return json.loads(value.to_json(orient="records"))
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
