"""How much each layer's attention output is perturbed, attention-only against two-stage."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import NAMES, PALETTE, axes, percent


def layer_perturbation(
    layers: pd.DataFrame, *, budget: float, queries: str = "first", norm: str = "L1", ax: Axes | None = None
) -> Axes:
    """‖Σ_h (o_h − ô_h) W_h‖ by layer on a log scale; the line is the mean over contexts, the band its range."""
    ax = axes(ax)
    chosen = layers[(layers["budget"] == budget) & (layers["queries"] == queries) & (layers["norm"] == norm)]
    sns.lineplot(
        chosen.assign(selection=chosen["policy"].map(NAMES)),
        x="layer",
        y="perturbation",
        hue="selection",
        palette=PALETTE,
        errorbar=("pi", 100),
        ax=ax,
    )
    if (chosen["perturbation"] > 0).any():
        ax.set_yscale("log")
    ax.set(xlabel="layer", ylabel=f"{norm} perturbation of the attention output", title=f"{percent(budget)} cache")
    return ax
