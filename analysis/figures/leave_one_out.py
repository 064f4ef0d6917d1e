"""Estimates of what a single entry's removal does, against the truth."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import axes

ESTIMATES = {
    "fisher": "Fisher estimate (nats)",
    "straight_through": "straight-through estimate (nats)",
    "straight_through_layer": "straight-through estimate, own MLP counted (nats)",
    "attention": "attention A",
    "value_norm": "A‖V W_O‖₁",
    "single_eviction": "error of the attention output ‖Δo‖₂",
}
SHOWN = 4_000


def leave_one_out(entries: pd.DataFrame, *, estimate: str = "fisher", legend: bool = True, ax: Axes | None = None) -> Axes:
    """An estimate against the exact KL, a point per entry (at most 4,000, drawn evenly), coloured by layer, on logarithmic axes.

    The dashed diagonal is exactness, for estimates in nats. The title is the mean rank correlation over contexts and layers.
    """
    ax = axes(ax)
    parts = [part[["exact", estimate]] for _, part in entries.groupby(["context", "layer"])]
    rho = np.mean([part.corr("spearman").iloc[0, 1] for part in parts])
    shown = entries[(entries["exact"] > 0) & (entries[estimate] > 0)]
    shown = shown.sample(n=min(SHOWN, len(shown)), random_state=0)
    sns.scatterplot(
        shown,
        x=estimate,
        y="exact",
        hue="layer",
        palette="viridis",
        s=7,
        alpha=0.6,
        linewidth=0,
        legend="full" if legend else False,
        ax=ax,
    )
    if ESTIMATES[estimate].endswith("(nats)"):
        ends = np.array([shown[["exact", estimate]].min().min(), shown[["exact", estimate]].max().max()])
        ax.plot(ends, ends, color="0.3", linewidth=1, linestyle="--")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel=ESTIMATES[estimate],
        ylabel="exact leave-one-out KL (nats)",
        title=f"rank correlation {rho:.3f}",
    )
    return ax
