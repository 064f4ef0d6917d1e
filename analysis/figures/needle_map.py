"""Where in a context an answer is found, and where it is lost: length against depth."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import axes
from analysis.wording import cache_size, percent


def needle_map(samples: pd.DataFrame, *, policy: str, budget: float = 1.0, bar: bool = True, ax: Axes | None = None) -> Axes:
    """Mean score of a policy at a budget, for each depth of the needle (rows) and context length (columns), 0 white to 1 dark.

    `samples` are rows of the table `samples` whose `depth` is known.

    Raises:
        ValueError: there is no such row.
    """
    chosen = samples[(samples["policy"] == policy) & (samples["budget"] == budget) & samples["depth"].notna()]
    if chosen.empty:
        raise ValueError(f"no row of {policy} at {cache_size(budget, ' entries')} has a depth")
    ax = axes(ax)
    depths = chosen["depth"].round(2).map(lambda depth: f"{100 * depth:.0f} %")
    order = [f"{100 * depth:.0f} %" for depth in sorted(chosen["depth"].round(2).unique())]
    table = chosen.assign(at=depths).pivot_table(index="at", columns="length", values="score").reindex(order)
    sns.heatmap(
        table,
        vmin=0,
        vmax=1,
        cmap="Blues",
        annot=True,
        fmt=".2f",
        cbar=bar,
        cbar_kws={"label": "score"} if bar else None,
        ax=ax,
    )
    title = "full cache" if policy == "full" else f"{policy}, {cache_size(budget, ' entries')} cache"
    ax.set(xlabel="context length (tokens)", ylabel="depth of the needle", title=f"{title}: {percent(chosen['score'].mean())}")
    ax.tick_params(axis="y", rotation=0)
    return ax
