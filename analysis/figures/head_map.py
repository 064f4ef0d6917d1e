"""The paper's head map: where two-stage selection lowers the perturbation, head by head and layer by layer."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import axes, unperturbed
from analysis.summary import relative_change
from analysis.wording import percent


def head_map(
    heads: pd.DataFrame, *, budget: float, queries: str = "first", norm: str = "L1", bar: bool = True, ax: Axes | None = None
) -> Axes:
    """Relative change of L, two-stage against attention-only, per head (across) and layer (down); mean over the contexts.

    Blue: two-stage perturbs less. Colours saturate at ±50 %. `heads` holds rows of the table of that name.
    """
    ax = axes(ax)
    change = relative_change(heads, norm=norm)
    chosen = change[(change["budget"] == budget) & (change["queries"] == queries)]
    if chosen.empty:
        return unperturbed(ax)
    grid = chosen.pivot_table(index="layer", columns="head", values="change", aggfunc="mean", dropna=False)
    improved = chosen["improved"].mean()
    sns.heatmap(
        grid * 100,
        cmap=sns.diverging_palette(245, 25, s=85, l=45, as_cmap=True),
        center=0,
        vmin=-50,
        vmax=50,
        cbar=bar,
        cbar_kws={"label": f"change of {norm} perturbation (%)", "extend": "both"},
        ax=ax,
    )
    ax.set(
        xlabel="query head",
        ylabel="layer",
        title=f"{percent(budget)} cache: lower in {improved * 100:.0f} % of heads",
    )
    ax.tick_params(axis="y", rotation=0)
    return ax
