"""`criticalkv evaluate`: tasks answered on what policies leave of the cache."""

import importlib.util
import sys
from math import isnan
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from analysis.cli import options
from analysis.cli.progress import progress_bar
from analysis.cli.tables import table
from analysis.errors import InputError
from analysis.grid import POLICIES, Grid, budgets, made, parted, whole_numbers
from analysis.schema import FULL
from analysis.settings import REFERENCE
from analysis.wording import cache_size

DEFAULT = ",".join(POLICIES)

if TYPE_CHECKING:
    from rich.table import Table

    from analysis.experiments.engines import Engine
    from analysis.experiments.evaluate import Evaluation


def evaluate(
    task: options.Task = "niah_single_1",
    model: Annotated[str, typer.Option(help="A Hugging Face id, a folder, or the reference model.")] = REFERENCE,
    context_length: options.Lengths = "1024",
    samples: options.Samples = 10,
    policies: options.Policies = DEFAULT,
    budget: options.Budgets = "0.1,0.2,0.4",
    aware: options.Aware = False,
    data: options.Data = None,
    haystack: options.Haystack = None,
    depths: options.Depths = 5,
    metric: options.Metric = None,
    max_new_tokens: options.MaxNewTokens = None,
    judge: options.Judge = 8,
    raw: options.Raw = False,
    use: options.Use = None,
    seed: options.Seeds = "0",
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    out: Annotated[Path, typer.Option(help="The run's folder; the same command goes on where it was stopped.")] = Path(
        "runs/evaluation"
    ),
    as_json: options.AsJson = False,
) -> None:
    """Ask a model questions about long contexts, on the full cache and on what each policy leaves of it.

    Example: [bold]criticalkv evaluate --task niah_single_2,vt --context-length 1024 --policies snapkv,adakv+two-stage --budgets 0.2,0.4[/]

    Each answer's row in samples.parquet has its score beside perturbation, σ, KL, and whether a right answer turned wrong.
    """
    if use is not None:
        imported(use)
    grid = made(
        models=(model,),
        **asked(task, context_length, policies, budget, seed),
        samples=samples,
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
    run(grid, out, as_json=as_json)


def asked(
    task: str | None, lengths: str | None, policies: str | None, budget: str | None, seed: str | None
) -> dict[str, tuple[Any, ...] | None]:
    """What options that are lists say, as `Grid` takes it.

    Raises:
        InputError: one says nothing, or no numbers.
    """
    return {
        "tasks": None if task is None else parted(task, "--task"),
        "lengths": None if lengths is None else whole_numbers(lengths, "--context-length"),
        "policies": None if policies is None else parted(policies, "--policies"),
        "budgets": None if budget is None else budgets(budget),
        "seeds": None if seed is None else whole_numbers(seed, "--seed"),
    }


def run(grid: Grid, out: Path, engine: "Engine | None" = None, *, as_json: bool = False) -> None:
    """Evaluate a grid under a progress bar, and print its tables; exit code 1 where cells could not be computed, 130 where it was stopped."""
    from transformers.utils import logging

    from analysis.experiments.evaluate import evaluate

    logging.disable_progress_bar()
    console = Console(stderr=True)
    with progress_bar(console, remaining=True) as progress:
        bar = progress.add_task("tasks", total=None)
        try:
            found = evaluate(
                grid,
                out,
                engine=engine,
                command=["criticalkv", *sys.argv[1:]],
                report=lambda done, total, what: progress.update(bar, completed=done, total=total, description=what or "tasks"),
            )
        except KeyboardInterrupt:
            progress.stop()
            console.print(f"stopped; what is done is kept in {out}, and the same command goes on", style="dim", markup=False)
            raise typer.Exit(130) from None
    if as_json:
        options.say({"folder": found.folder, "scores": found.scores, "failures": dict(found.failures)})
    else:
        show(found)
    if found.failures:
        console.print(f"[bold red]{len(found.failures)} cells could not be computed:[/]")
        for reason in dict.fromkeys(found.failures.values()):
            console.print(f"  {reason}", markup=False)
        raise typer.Exit(1)


def imported(path: Path) -> ModuleType:
    """Run a user's Python file; what it defines.

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
    return module


def show(found: "Evaluation") -> None:
    """Print the scores, a table for each model, task and length."""
    console = Console()
    for _, part in found.scores.groupby(["model", "source", "task", "length", "question"], sort=False):
        rows = part.to_dict("records")
        first = rows[0]
        length = f", {first['length']} tokens" if first["length"] else ""
        source = first["source"] if first["source"] == first["task"] else f"{first['source']}, {first['task']}"
        title = f"{first['model']}: {source}{length}, question {first['question']}, {first['samples']} samples"
        console.print(_table(title, rows))
    console.print(
        "score with its 95 % interval; flipped: right answers of the full cache that turned wrong", style="dim", markup=False
    )
    console.print(f"Rows: {found.folder / 'samples.parquet'}", soft_wrap=True, markup=False)


def _table(title: str, rows: list[dict[Any, Any]]) -> "Table":
    return table(
        ("policy", "cache", "score", "interval", "change", "flipped", "KL (nats)", "bytes"),
        [_cells(row) for row in rows],
        title,
    )


def _cells(row: dict[Any, Any]) -> tuple[str, ...]:
    full = row["policy"] == FULL
    return (
        row["policy"],
        cache_size(row["budget"]),
        f"{row['score']:.2f}",
        "" if isnan(row["score_low"]) else f"{row['score_low']:.2f} to {row['score_high']:.2f}",
        "" if full else f"{row['change']:+.2f}",
        "" if full or isnan(row["flipped"]) else f"{row['flipped']:.0%}",
        "" if full else f"{row['kl']:.3g}",
        f"{row['bytes_share']:.1%}",
    )
