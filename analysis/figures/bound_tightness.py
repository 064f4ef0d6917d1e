"""How far below the paper's bound θ the truth lies."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import NAMES, PALETTE, axes, pair, percent, unperturbed


def bound_tightness(
    heads: pd.DataFrame, *, budget: float, queries: str = "first", norm: str = "L1", ax: Axes | None = None
) -> Axes:
    """Mean L against mean θ, a point per context, layer and head; no point may lie above the diagonal L = θ."""
    ax = axes(ax)
    heads = pair(heads)
    chosen = heads[
        (heads["budget"] == budget) & (heads["queries"] == queries) & (heads["norm"] == norm) & (heads["perturbation"] > 0)
    ]
    if chosen.empty:
        return unperturbed(ax)
    # in a shuffled order, so that neither selection covers the other
    points = chosen.assign(selection=chosen["policy"].map(NAMES)).sample(frac=1, random_state=0)
    sns.scatterplot(
        points,
        x="theta",
        y="perturbation",
        hue="selection",
        hue_order=list(PALETTE),
        palette=PALETTE,
        style="selection",
        style_order=list(PALETTE),
        markers=["o", "^"],
        s=9,
        alpha=0.5,
        linewidth=0,
        ax=ax,
    )
    low, high = points["perturbation"].min(), points["theta"].max()
    ax.plot([low, high], [low, high], color="0.3", linewidth=1, linestyle="--")
    ax.annotate("L = θ", (np.sqrt(low * high),) * 2, xytext=(-6, 6), textcoords="offset points", ha="right", color="0.3")
    tightness = (points["theta"] / points["perturbation"]).median()
    ax.set(
        xscale="log",
        yscale="log",
        xlabel=f"bound θ ({norm})",
        ylabel=f"exact {norm} perturbation L",
        title=f"{percent(budget)} cache: median θ / L = {tightness:.1f}",
    )
    return ax
