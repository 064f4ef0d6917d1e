"""How the hidden state drifts from the full cache's, layer after layer."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import NAMES, PALETTE, axes, percent


def drift(layers: pd.DataFrame, *, budget: float, queries: str = "later", norm: str = "L1", ax: Axes | None = None) -> Axes:
    """‖h − ĥ‖ / ‖h‖ after each layer, every layer evicted; the line is the mean over contexts, the band its range."""
    ax = axes(ax)
    chosen = layers[(layers["budget"] == budget) & (layers["queries"] == queries) & (layers["norm"] == norm)]
    sns.lineplot(
        chosen.assign(selection=chosen["policy"].map(NAMES)),
        x="layer",
        y="drift",
        hue="selection",
        palette=PALETTE,
        errorbar=("pi", 100),
        ax=ax,
    )
    ax.set(xlabel="layer", ylabel=f"relative {norm} drift of the hidden state", title=f"{percent(budget)} cache")
    ax.set_ylim(bottom=0, auto=True)  # panels that share the axis may still raise its top
    return ax
