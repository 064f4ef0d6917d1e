"""All figures of a run, each with the sentence that says how to read it."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from analysis.ablations import middle_budget
from analysis.figures.bound_tightness import bound_tightness
from analysis.figures.budget_curve import budget_curve
from analysis.figures.drift import drift
from analysis.figures.evidence import ablations, evidence
from analysis.figures.head_map import head_map
from analysis.figures.layer_perturbation import layer_perturbation
from analysis.figures.picture import Draw, Picture, query_panels
from analysis.figures.retained_mass import retained_mass
from analysis.figures.style import pair, style
from analysis.figures.win_rate import win_rate
from analysis.schema import HEADS, LAYERS, QUERY_SETS


def gallery(tables: Mapping[str, pd.DataFrame], label: str) -> list[Picture]:
    """The figures of a validation's tables; `label` names the model and what a reader must know of its weights."""
    heads, layers = tables[HEADS.name], tables[LAYERS.name]
    with style():
        return [*_compared(heads, layers, label), *ablations(heads, label), *evidence(tables, label)]


def _compared(heads: pd.DataFrame, layers: pd.DataFrame, label: str) -> list[Picture]:
    """The figures of the pair that a validation compares."""
    budget = middle_budget(pair(heads)["budget"].unique())
    decoded = [name for name in QUERY_SETS if name != "window"]
    everything = list(QUERY_SETS)

    def panels(title: str, sets: Sequence[str], draw: Draw, *, height: float = 3.9) -> Figure:
        return query_panels(title, label, sets, draw, height=height)

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
        Picture(
            "budget_curve",
            "Perturbation by cache size",
            "A lower line perturbs less (bands: range over the contexts).",
            panels(
                "Mean L1 perturbation of a head by cache size",
                everything,
                lambda ax, queries, last: budget_curve(heads, queries=queries, ax=ax),
            ),
        ),
    ]
