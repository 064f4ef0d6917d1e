"""`criticalkv evaluate`: tasks answered on what policies leave of the cache."""

import importlib.util
import sys
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from analysis.cli.progress import progress_bar
from analysis.errors import InputError
from analysis.grid import POLICIES, Grid, budgets, parted, whole_numbers
from analysis.schema import FULL
from analysis.settings import DTYPES, REFERENCE

if TYPE_CHECKING:
    from analysis.experiments.evaluate import Evaluation


def evaluate(
    task: Annotated[
        str,
        typer.Option(
            help="Tasks, separated by commas: RULER's (niah_single_1, vt, …; ruler-offline are the eleven that need no data), needle, "
            "fidelity, LongBench's (qasper, …; longbench are all), a file of rows (mine.jsonl), a data set (owner/name:config@split)."
        ),
    ] = "niah_single_1",
    model: Annotated[str, typer.Option(help="A Hugging Face id, a folder, or the reference model.")] = REFERENCE,
    context_length: Annotated[str, typer.Option(help="Tokens of the prompt, one length or several.")] = "1024",
    samples: Annotated[int, typer.Option(help="Samples of each task and length.")] = 10,
    policies: Annotated[
        str, typer.Option(help="What is compared, separated by commas; parameters go behind a colon (snapkv:pooling=none).")
    ] = ",".join(POLICIES),
    budget: Annotated[
        str, typer.Option("--budgets", help="Shares of the context's entries (0.2), or entries per KV head (512).")
    ] = "0.1,0.2,0.4",
    aware: Annotated[
        bool, typer.Option("--query-aware", help="Let policies see the question; else the context is compressed before.")
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="What qa_1, qa_2 and LongBench's tasks read: a file, or a data set on the hub.")
    ] = None,
    haystack: Annotated[
        Path | None, typer.Option(help="A text file to hide needles in; default: Python's documentation.")
    ] = None,
    depths: Annotated[int, typer.Option(help="Places of the needle in the task needle, from the start to the end.")] = 5,
    metric: Annotated[
        str | None, typer.Option(help="Score answers so, whatever the task: all, part, exact, f1, rouge-l, …")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer, in place of the task's own.")] = None,
    judge: Annotated[
        int, typer.Option(help="Queries of each answer whose attention outputs are compared exactly; 0 for none.")
    ] = 8,
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts as they are, without the model's chat template.")] = False,
    use: Annotated[
        Path | None, typer.Option("--import", help="A Python file of yours that registers tasks or policies; it is run.")
    ] = None,
    seed: Annotated[str, typer.Option(help="Of what is drawn, one or several.")] = "0",
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, …")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"Of the model's weights: one of {', '.join(DTYPES)}.")] = "float32",
    out: Annotated[Path, typer.Option(help="The run's folder; the same command goes on where it was stopped.")] = Path(
        "runs/evaluation"
    ),
) -> None:
    """Ask a model questions about long contexts, on the full cache and on what each policy leaves of it.

    Example: [bold]criticalkv evaluate --task niah_single_2,vt --context-length 1024 --policies snapkv,adakv+two-stage --budgets 0.2,0.4[/]

    Each answer's row in samples.parquet has its score beside perturbation, σ, KL, and whether a right answer turned wrong.
    """
    if use is not None:
        imported(use)
    grid = Grid(
        models=(model,),
        tasks=parted(task, "--task"),
        lengths=whole_numbers(context_length, "--context-length"),
        policies=parted(policies, "--policies"),
        budgets=budgets(budget),
        samples=samples,
        seeds=whole_numbers(seed, "--seed"),
        aware=aware,
        raw=raw,
        max_new_tokens=max_new_tokens,
        metric=metric,
        data=data,
        depths=depths,
        haystack=haystack,
        judge=judge,
        device=device,
        dtype=dtype,
    )
    from transformers.utils import logging

    from analysis.experiments.evaluate import evaluate as run

    logging.disable_progress_bar()
    console = Console(stderr=True)
    with progress_bar(console) as progress:
        bar = progress.add_task("tasks", total=None)
        try:
            found = run(
                grid,
                out,
                command=["criticalkv", *sys.argv[1:]],
                report=lambda done, total, what: progress.update(bar, completed=done, total=total, description=what or "tasks"),
            )
        except KeyboardInterrupt:
            progress.stop()
            console.print(f"stopped; the same command goes on with --out {out}", style="dim", markup=False)
            raise typer.Exit(130) from None
    _print(found)
    if found.failures:
        console.print(f"[bold red]{len(found.failures)} cells could not be computed:[/]")
        for reason in dict.fromkeys(found.failures.values()):
            console.print(f"  {reason}", markup=False)
        raise typer.Exit(1)


def imported(path: Path) -> None:
    """Run a user's Python file.

    Raises:
        InputError: it is not there, or raises.
    """
    if not path.is_file():
        raise InputError(f"--import {path}: there is no such file")
    name = f"criticalkv_import_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"--import {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's own code raises
        raise InputError(f"--import {path} raised {type(error).__name__}: {error}") from error


def _print(found: "Evaluation") -> None:
    console = Console()
    for _, part in found.scores.groupby(["model", "source", "length", "question"], sort=False):
        rows = part.to_dict("records")
        first = rows[0]
        length = f", {first['length']} tokens" if first["length"] else ""
        console.print(
            _table(
                f"{first['model']}: {first['source']}{length}, question {first['question']}, {first['samples']} samples", rows
            )
        )
    console.print(
        "score with its 95 % interval; flipped: right answers of the full cache that turned wrong", style="dim", markup=False
    )
    console.print(f"Rows: {found.folder / 'samples.parquet'}", soft_wrap=True, markup=False)


def _table(title: str, rows: list[dict[Any, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for column in ("cache", "score", "interval", "change", "flipped", "KL (nats)", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        full, budget = row["policy"] == FULL, row["budget"]
        table.add_row(
            row["policy"],
            f"{budget:g}" if budget > 1 else f"{100 * budget:.3g} %",
            f"{row['score']:.2f}",
            "" if isnan(row["score_low"]) else f"{row['score_low']:.2f} to {row['score_high']:.2f}",
            "" if full else f"{row['change']:+.2f}",
            "" if full or isnan(row["flipped"]) else f"{row['flipped']:.0%}",
            "" if full else f"{row['kl']:.3g}",
            f"{row['bytes_share']:.1%}",
        )
    return table
