"""What the figures of a bound share: the truth against it, on logarithmic axes."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes


def under_bound(
    ax: Axes, points: pd.DataFrame, bound: str, *, by: str, colours: Mapping[str, str], norm: str, name: str, size: float
) -> Axes:
    """`perturbation` against the column `bound`, a point per row, coloured and marked by `by`; no point may lie above the diagonal.

    Points are drawn in a shuffled order, so that neither colour covers the other. `name` is what the bound is called.
    """
    shuffled = points.sample(frac=1, random_state=0)
    names = list(colours)
    sns.scatterplot(
        shuffled, x=bound, y="perturbation", hue=by, hue_order=names, style=by, style_order=names, markers=["o", "^"],
        palette=dict(colours), s=size, alpha=0.5, linewidth=0, ax=ax,
    )  # fmt: skip
    low, high = points["perturbation"].min(), points[bound].max()
    ax.plot([low, high], [low, high], color="0.3", linewidth=1, linestyle="--")
    middle = (np.sqrt(low * high),) * 2
    ax.annotate(f"L = {name}", middle, xytext=(-6, 6), textcoords="offset points", ha="right", color="0.3")
    ax.set(xscale="log", yscale="log", ylabel=f"exact {norm} perturbation L")
    return ax
