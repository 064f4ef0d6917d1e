"""Where a policy spends its budget: layer against KV head."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import axes
from analysis.wording import percent


def allocation_map(
    allocation: pd.DataFrame,
    *,
    policy: str,
    budget: float | None = None,
    top: float | None = None,
    bar: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Share of the prompt's entries that each KV head keeps, mean over contexts; darker keeps more.

    `top` ends the scale, so that several maps can share one; by default it is the largest share.

    Raises:
        ValueError: there is no such row.
    """
    chosen = allocation[allocation["policy"] == policy]
    budget = chosen["budget"].min() if budget is None else budget
    chosen = chosen[chosen["budget"] == budget]
    if chosen.empty:
        raise ValueError(f"no row says what {policy} keeps at {budget}")
    ax = axes(ax)
    shares = (100 * chosen["kept"] / chosen["tokens"]).rename("share")
    grid = pd.concat([chosen[["layer", "kv_head"]], shares], axis=1).pivot_table(
        index="layer", columns="kv_head", values="share"
    )
    sns.heatmap(grid, vmin=0, vmax=top, cmap="Blues", cbar=bar, cbar_kws={"label": "entries kept (%)"} if bar else None, ax=ax)
    ax.set(xlabel="KV head", ylabel="layer", title=f"{policy}, {percent(budget)} cache")
    ax.tick_params(axis="y", rotation=0)
    return ax
