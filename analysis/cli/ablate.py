"""`criticalkv ablate`: one setting varied, all else the same."""

import dataclasses
from math import isnan
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from analysis.ablations import ABLATIONS, PAPERS_BUDGET, Ablation
from analysis.cli.options import VALIDATION as DEFAULTS
from analysis.cli.options import AsJson, Context, InDtype, Later, Model, OnDevice, Out, Passages, PassageSeed, Window, say
from analysis.cli.tables import table
from analysis.cli.validate import default_folder, measure
from analysis.errors import InputError
from analysis.grid import nearest
from analysis.wording import cache_size

if TYPE_CHECKING:
    import pandas as pd

NAMES = ", ".join(ABLATIONS)
COLUMNS = ("variant", "cache", "tokens", "ΔΣL", "interval", "improved", "KL (nats)")


def ablate(
    name: Annotated[str, typer.Argument(help=f"What is varied: {NAMES}.")],
    model: Model = DEFAULTS.model,
    context: Context = None,
    passages: Passages = DEFAULTS.passages,
    context_length: Annotated[
        int | None, typer.Option(help="Tokens of each context, at most; 1024 where the ablation does not vary it.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Share of the cache to keep; 0.2 where the ablation does not vary it.")
    ] = None,
    window: Window = DEFAULTS.window,
    later: Later = DEFAULTS.later,
    seed: PassageSeed = DEFAULTS.seed,
    device: OnDevice = DEFAULTS.device,
    dtype: InDtype = DEFAULTS.dtype,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Vary one setting of the selection and measure the perturbation, the hidden states and the next tokens under each value.

    Example: [bold]criticalkv ablate alpha --context paper.txt --out runs/alpha[/]
    """
    if name not in ABLATIONS:
        raise InputError(f"no ablation is called {name!r}; {nearest(name, tuple(ABLATIONS))}")
    asked = ABLATIONS[name]
    for option, given, varied in (("--context-length", context_length, asked.lengths), ("--budget", budget, asked.budgets)):
        if given is not None and varied:
            raise InputError(
                f"the ablation {name} varies it: leave {option} out; it measures {', '.join(f'{one:g}' for one in varied)}"
            )
    settings = dataclasses.replace(
        DEFAULTS,
        model=model,
        context_files=tuple(context or ()),
        passages=passages,
        context_length=DEFAULTS.context_length if context_length is None else context_length,
        budgets=(PAPERS_BUDGET if budget is None else budget,),
        window=window,
        later=later,
        seed=seed,
        device=device,
        dtype=dtype,
        ablations=(name,),
        lengths=asked.lengths or (),
        leave_one_out=0,
        others=False,
    )
    finished = measure(settings, out or default_folder(f"ablate-{name}"))
    if as_json:
        from analysis.summary import variant_change

        say({"folder": finished.folder, "question": asked.question, "rows": variant_change(finished.heads, asked)})
        return
    console = Console()
    console.print(asked.question, style="bold", markup=False)
    for queries, label in (("first", "first decoded token"), ("later", "later tokens")):
        rows = summary(finished.heads, finished.runs, asked, queries)
        console.print(table(COLUMNS, rows, f"{label}, against {next(iter(asked.variants))}", fold=("variant",)))
    console.print(
        "ΔΣL: of the sum over heads, mean over contexts with its interval at 95 %; improved: heads with lower L", style="dim"
    )
    console.print(f"Tables, figures, report: {finished.folder}", soft_wrap=True, markup=False)


def summary(heads: "pd.DataFrame", runs: "pd.DataFrame", asked: Ablation, queries: str) -> list[tuple[str, ...]]:
    """The rows that are printed for a query set: one for each variant, budget and, where they differ, length."""
    from analysis.report.tables import share, signed
    from analysis.statistics import student
    from analysis.summary import variant_change

    change = variant_change(heads[heads["queries"] == queries], asked)
    tokens = runs.groupby("context")["tokens"].first()
    kl = runs.set_index(["context", "policy", "budget"])["kl"]
    change = change.assign(
        tokens=change["context"].map(tokens),
        kl=[kl[key] for key in zip(change["context"], change["policy"], change["budget"], strict=True)],
    )
    rows: list[tuple[str, ...]] = []
    for key, part in change.groupby(["variant", "budget", "tokens"], sort=False):
        variant, budget, length = key
        total = student(part["total_change"])
        rows.append(
            (
                str(variant),
                cache_size(float(str(budget))),
                f"{length:,}",
                signed(total.value),
                "" if isnan(total.low) else f"{signed(total.low)} to {signed(total.high)}",
                share(part["improved"].mean()),
                f"{part['kl'].mean():.4f}",
            )
        )
    return rows
