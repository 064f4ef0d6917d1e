"""How far above the truth the paper's bound lies, and how far ours."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import axes, percent, unperturbed

BOUNDS = {"theta": "θ (the paper's)", "theta_o_hat": "θ_ô (ours)"}
COLOURS = {"θ (the paper's)": "#cc78bc", "θ_ô (ours)": "#029e73"}


def bounds_compared(single: pd.DataFrame, *, choice: str = "attention", norm: str = "L1", ax: Axes | None = None) -> Axes:
    """L against both bounds, two points per single query head on logarithmic axes; none may lie above the diagonal."""
    ax = axes(ax)
    chosen = single[(single["choice"] == choice) & (single["norm"] == norm) & (single["perturbation"] > 0)]
    if chosen.empty:
        return unperturbed(ax)
    long = chosen.melt(["perturbation"], list(BOUNDS), "bound", "value").replace({"bound": BOUNDS})
    long = long.sample(frac=1, random_state=0)  # neither covers the other
    names = list(COLOURS)
    sns.scatterplot(
        long, x="value", y="perturbation", hue="bound", hue_order=names, style="bound", style_order=names, markers=["o", "^"],
        palette=COLOURS, s=10, alpha=0.5, linewidth=0, ax=ax,
    )  # fmt: skip
    ends = long["perturbation"].min(), long["value"].max()
    ax.plot(ends, ends, color="0.3", linewidth=1, linestyle="--")
    ax.annotate(
        "L = bound", (np.sqrt(ends[0] * ends[1]),) * 2, xytext=(-6, 6), textcoords="offset points", ha="right", color="0.3"
    )
    medians = {name: (chosen[name] / chosen["perturbation"]).median() for name in BOUNDS}
    ax.set(
        xscale="log",
        yscale="log",
        xlabel=f"bound ({norm})",
        ylabel=f"exact {norm} perturbation L",
        title=f"{percent(chosen['budget'].iloc[0])} cache, medians: θ / L = {medians['theta']:.1f}, θ_ô / L = {medians['theta_o_hat']:.1f}",
    )
    return ax
