"""In which layers two-stage selection perturbs a majority of heads less."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import axes, unperturbed
from analysis.summary import relative_change
from analysis.wording import percent


def win_rate(heads: pd.DataFrame, *, queries: str = "first", norm: str = "L1", ax: Axes | None = None) -> Axes:
    """Share of (context, head) pairs whose L is lower under two-stage, by layer, a line per budget; ½ is no difference."""
    ax = axes(ax)
    change = relative_change(heads, norm=norm)
    chosen = change[change["queries"] == queries]
    if chosen.empty:
        return unperturbed(ax)
    share = chosen.groupby(["layer", "budget"])["improved"].mean().mul(100).reset_index()
    share["cache"] = share["budget"].map(percent)
    sns.lineplot(
        share,
        x="layer",
        y="improved",
        hue="cache",
        hue_order=[percent(budget) for budget in sorted(share["budget"].unique())],
        palette="viridis",
        ax=ax,
    )
    ax.axhline(50, color="0.3", linewidth=1, linestyle="--")
    ax.set(xlabel="layer", ylabel="heads with lower perturbation (%)", ylim=(0, 100))
    return ax
