"""All figures of a run, each with the sentence that says how to read it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.figures.bound_tightness import bound_tightness
from analysis.figures.drift import drift
from analysis.figures.head_map import head_map
from analysis.figures.layer_perturbation import layer_perturbation
from analysis.figures.retained_mass import retained_mass
from analysis.figures.style import QUERY_TITLES, style
from analysis.figures.win_rate import win_rate
from analysis.schema import QUERY_SETS

Draw = Callable[[Axes, str, bool], Axes]  # (axes, query set, is it the last panel)


@dataclass(frozen=True)
class Picture:
    """One figure of the gallery: `name` names its files, `reading` says in a sentence how to read it."""

    name: str
    title: str
    reading: str
    figure: Figure

    def save(self, folder: Path) -> None:
        """Write NAME.png and NAME.svg."""
        with style():
            self.figure.savefig(folder / f"{self.name}.png", dpi=150)
            self.figure.savefig(folder / f"{self.name}.svg", metadata={"Date": None})


def middle_budget(budgets: Sequence[float]) -> float:
    """The budget that figures of one budget show: the one nearest to the paper's 20 %."""
    return min(budgets, key=lambda budget: (abs(budget - 0.2), budget))


def gallery(heads: pd.DataFrame, layers: pd.DataFrame, label: str) -> list[Picture]:
    """The figures of a validation; `label` names the model and what a reader must know of its weights."""
    budget = middle_budget(sorted(heads["budget"].unique()))
    decoded = [name for name in QUERY_SETS if name != "window"]
    everything = list(QUERY_SETS)

    def panels(title: str, sets: Sequence[str], draw: Draw, *, height: float = 3.9) -> Figure:
        return _panels(title, label, sets, draw, height)

    with style():
        return [
            Picture(
                "head_map",
                "Where two-stage selection perturbs less",
                "Blue heads are perturbed less by two-stage than by attention-only selection, orange ones more; colours end at "
                "±50 %.",
                panels(
                    "Change of each head's L1 perturbation, two-stage against attention-only",
                    everything,
                    lambda ax, queries, last: head_map(heads, budget=budget, queries=queries, bar=last, ax=ax),
                    height=6,
                ),
            ),
            Picture(
                "layer_perturbation",
                "Perturbation by layer",
                "The change of each layer's attention output, heads summed before the norm; a lower line perturbs less (bands: "
                "range over the contexts).",
                panels(
                    "L1 perturbation of each layer's attention output",
                    everything,
                    lambda ax, queries, last: layer_perturbation(layers, budget=budget, queries=queries, ax=ax),
                ),
            ),
            Picture(
                "win_rate",
                "Win rate by layer",
                "The share of heads that two-stage selection perturbs less; above the dashed line it wins more heads than it "
                "loses.",
                panels(
                    "Heads with lower L1 perturbation under two-stage selection",
                    everything,
                    lambda ax, queries, last: win_rate(heads, queries=queries, ax=ax),
                ),
            ),
            Picture(
                "bound_tightness",
                "The truth below the bound",
                "Each point is one head of one context; the further below the dashed line, the looser the bound θ.",
                panels(
                    "Exact L1 perturbation L against the paper's bound θ",
                    everything,
                    lambda ax, queries, last: bound_tightness(heads, budget=budget, queries=queries, ax=ax),
                ),
            ),
            Picture(
                "retained_mass",
                "Where σ > ½ holds",
                "The attention mass on kept entries (box: middle half of the heads, whiskers: 1 to 99 %); the paper's choice "
                "of stage 2 is justified above the dashed line.",
                panels(
                    "Retained attention mass σ",
                    everything,
                    lambda ax, queries, last: retained_mass(heads, queries=queries, ax=ax),
                ),
            ),
            Picture(
                "drift",
                "Hidden-state drift",
                "How far the hidden state after each layer lies from the full cache's, in a real forward pass with every "
                "layer evicted (bands: range over the contexts).",
                panels(
                    "Drift of the hidden state through the layers",
                    decoded,
                    lambda ax, queries, last: drift(layers, budget=budget, queries=queries, ax=ax),
                ),
            ),
        ]


def _panels(title: str, label: str, sets: Sequence[str], draw: Draw, height: float) -> Figure:
    """One panel per query set, side by side on one scale, with one legend beside them."""
    figure = Figure(figsize=(4.2 * len(sets), height), layout="constrained")
    row = figure.subplots(1, len(sets), sharey=True, squeeze=False)[0]
    for ax, queries in zip(row, sets, strict=True):
        last = ax is row[-1]
        draw(ax, queries, last)
        detail = ax.get_title()
        ax.set_title(f"{QUERY_TITLES[queries]}\n{detail}" if detail else QUERY_TITLES[queries])
        if ax is not row[0]:
            ax.set_ylabel("")
        if legend := ax.get_legend():
            handles, names = ax.get_legend_handles_labels()
            heading = legend.get_title().get_text()
            legend.remove()
            if last:
                figure.legend(handles, names, title=heading, loc="outside right center")
    figure.suptitle(title)
    figure.supxlabel(label, fontsize="small", color="0.4")
    return figure
