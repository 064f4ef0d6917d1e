"""What the figures of one quantity by layer share: the rows they show and how they draw them."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import NAMES, PALETTE, axes, pair
from analysis.wording import percent


def by_layer(
    layers: pd.DataFrame, column: str, label: str, *, budget: float, queries: str, norm: str, log: bool = False, ax: Axes | None
) -> Axes:
    """`column` of the table `layers` against the layer, a line per selection: the mean over contexts, the band their range.

    `log` asks for a log scale, where there is anything above 0 to show on one.
    """
    ax = axes(ax)
    layers = pair(layers)
    chosen = layers[(layers["budget"] == budget) & (layers["queries"] == queries) & (layers["norm"] == norm)]
    sns.lineplot(
        chosen.assign(selection=chosen["policy"].map(NAMES)),
        x="layer",
        y=column,
        hue="selection",
        style="selection",
        style_order=list(PALETTE),  # told apart in grey too
        palette=PALETTE,
        errorbar=("pi", 100),
        ax=ax,
    )
    if log and (chosen[column] > 0).any():
        ax.set_yscale("log")
    ax.set(xlabel="layer", ylabel=label, title=f"{percent(budget)} cache")
    return ax
