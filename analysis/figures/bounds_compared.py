"""How far above the truth the paper's bound lies, and how far ours."""

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.style import axes, unperturbed
from analysis.figures.under_bound import under_bound
from analysis.wording import percent

BOUNDS = {"theta": "θ (the paper's)", "theta_o_hat": "θ_ô (ours)"}
COLOURS = {"θ (the paper's)": "#cc78bc", "θ_ô (ours)": "#029e73"}


def bounds_compared(single: pd.DataFrame, *, choice: str = "attention", norm: str = "L1", ax: Axes | None = None) -> Axes:
    """L against both bounds, two points per single query head on logarithmic axes; none may lie above the diagonal."""
    ax = axes(ax)
    chosen = single[(single["choice"] == choice) & (single["norm"] == norm) & (single["perturbation"] > 0)]
    if chosen.empty:
        return unperturbed(ax)
    long = chosen.melt(["perturbation"], list(BOUNDS), "bound", "value").replace({"bound": BOUNDS})
    under_bound(ax, long, "value", by="bound", colours=COLOURS, norm=norm, name="bound", size=10)
    medians = {name: (chosen[name] / chosen["perturbation"]).median() for name in BOUNDS}
    ax.set(
        xlabel=f"bound ({norm})",
        title=f"{percent(chosen['budget'].iloc[0])} cache, medians: θ / L = {medians['theta']:.1f}, θ_ô / L = {medians['theta_o_hat']:.1f}",
    )
    return ax
