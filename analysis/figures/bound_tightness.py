"""How far below the paper's bound θ the truth lies."""

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.style import NAMES, PALETTE, axes, pair, unperturbed
from analysis.figures.under_bound import under_bound
from analysis.wording import percent


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
    points = chosen.assign(selection=chosen["policy"].map(NAMES))
    under_bound(ax, points, "theta", by="selection", colours=PALETTE, norm=norm, name="θ", size=9)
    tightness = (points["theta"] / points["perturbation"]).median()
    ax.set(xlabel=f"bound θ ({norm})", title=f"{percent(budget)} cache: median θ / L = {tightness:.1f}")
    return ax
