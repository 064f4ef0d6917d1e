"""`criticalkv validate`: the theory held against a model and some text."""

import sys
from collections.abc import Hashable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from analysis.cli.options import VALIDATION as DEFAULTS
from analysis.cli.options import (
    AsJson,
    Context,
    ContextLength,
    InDtype,
    Later,
    Model,
    OnDevice,
    Out,
    Passages,
    PassageSeed,
    Window,
    say,
)
from analysis.cli.progress import progress_bar
from analysis.cli.tables import table
from analysis.errors import InputError
from analysis.settings import POOLINGS, ValidationSettings
from analysis.wording import label

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from analysis.experiments.run import Validation

TOLD = ("what is claimed, and what was measured",)
BUDGETS = ",".join(map("{:g}".format, DEFAULTS.budgets))


def validate(
    model: Model = DEFAULTS.model,
    context: Context = None,
    passages: Passages = DEFAULTS.passages,
    context_length: ContextLength = DEFAULTS.context_length,
    window: Window = DEFAULTS.window,
    kernel: Annotated[int, typer.Option(help="Width of the pooling of scores along the keys.")] = DEFAULTS.kernel,
    pooling: Annotated[str, typer.Option(help=f"One of {', '.join(POOLINGS)}.")] = DEFAULTS.pooling,
    budgets: Annotated[str, typer.Option(help="Shares of the cache to keep, separated by commas.")] = BUDGETS,
    alpha: Annotated[float, typer.Option(help="Share of the free budget that stage 1 spends.")] = DEFAULTS.alpha,
    epsilon: Annotated[float, typer.Option(help="Added to attention in stage 2.")] = DEFAULTS.epsilon,
    later: Later = DEFAULTS.later,
    leave_one_out: Annotated[
        int, typer.Option(help="Tokens of each context whose entries are removed one by one, exactly; 0 for none.")
    ] = DEFAULTS.leave_one_out,
    full: Annotated[
        bool, typer.Option("--full", help="Also what takes long: times, and RULER's tasks answered at 40 % cache.")
    ] = False,
    answers: Annotated[
        Path | None, typer.Option(help="An evaluation's folder, by whose rows the claims about tasks are judged.")
    ] = None,
    seed: PassageSeed = DEFAULTS.seed,
    device: OnDevice = DEFAULTS.device,
    dtype: InDtype = DEFAULTS.dtype,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Which of the theory's claims hold on a model? Measures every head and layer under eviction, and fills the ledger of claims.

    Example: [bold]criticalkv validate --context paper.txt --budgets 0.1,0.2 --out runs/paper[/]

    Writes claims.parquet (the ledger), the tables that it was made from, figures (PNG and SVG) and report.html. A run that was stopped goes
    on when the same command is given again with its --out.
    """
    settings = ValidationSettings(
        model=model,
        context_files=tuple(context or ()),
        passages=passages,
        context_length=context_length,
        window=window,
        kernel=kernel,
        pooling=pooling,
        budgets=_budgets(budgets),
        alpha=alpha,
        epsilon=epsilon,
        later=later,
        leave_one_out=leave_one_out,
        full=full,
        answers=answers,
        seed=seed,
        device=device,
        dtype=dtype,
    )
    finished = measure(settings, out or default_folder("validate"))
    if as_json:
        say({"folder": finished.folder, "report": finished.report, "claims": finished.claims})
    else:
        _print(finished)


def default_folder(command: str) -> Path:
    """Where a command writes that was told no folder."""
    return Path("runs") / datetime.now().strftime(f"{command}-%Y%m%d-%H%M%S")


def measure(settings: ValidationSettings, folder: Path) -> "Validation":
    """Run a validation with a progress bar.

    Raises:
        typer.Exit: it was interrupted; what is finished is kept.
    """
    # loaded after the settings are known to be good: torch and transformers take seconds
    from transformers.utils import logging

    from analysis.experiments.run import validate as run

    logging.disable_progress_bar()
    console = Console(stderr=True)
    try:
        with progress_bar(console) as progress:
            task = progress.add_task("starting", total=None)

            def report(done: int, total: int, step: str) -> None:
                progress.update(task, completed=done, total=total, description=step)

            return run(settings, folder, command=["criticalkv", *sys.argv[1:]], report=report)
    except KeyboardInterrupt:
        if folder.exists():
            console.print(
                f"stopped; what is finished is kept. To go on, give the same command with --out {folder}", markup=False
            )
        raise typer.Exit(130) from None


def _budgets(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"--budgets takes numbers separated by commas, such as 0.1,0.2; not {text!r}") from None


def _print(finished: "Validation") -> None:
    from analysis.report.tables import LEGEND, behaviour_table, counted, ledger_table, perturbation_table
    from analysis.summary import behaviour_summary, perturbation_summary, violations

    console = Console()
    console.print(label(finished.about["model"]), markup=False, style="bold")
    console.print(
        _shown("L1 perturbation, two-stage against attention-only", perturbation_table(perturbation_summary(finished.heads)))
    )
    console.print(LEGEND + "\n", style="dim")
    console.print(
        _shown(f"The next {finished.about['settings']['later']} tokens", behaviour_table(behaviour_summary(finished.runs)))
    )
    rows = [
        (row["claim"], row["verdict"], "\n".join(filter(None, (row["statement"], _measured(row)))))
        for row in ledger_table(finished.claims).to_dict("records")
    ]
    console.print(table(("claim", "verdict", *TOLD), rows, "Which claims hold here?", left=3, fold=TOLD))
    console.print(counted(finished.claims))
    broken = violations(finished.heads)
    console.print("L ≤ θ held for every query of every head." if broken == 0 else f"[bold red]L > θ for {broken} queries.[/]")
    console.print(f"Report: {finished.report}", soft_wrap=True, markup=False)


def _measured(row: Mapping[Hashable, str]) -> str:
    """What was measured of a claim, in a line."""
    found = row["measured"] + (f" ({row['95 % interval']})" if row["95 % interval"] else "")
    return "; ".join(filter(None, (found, row["paper"] and f"paper: {row['paper']}")))


def _shown(title: str, frame: "pd.DataFrame") -> "Table":
    return table(list(frame.columns), frame.itertuples(index=False, name=None), title)
