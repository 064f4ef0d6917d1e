"""What policies' choices do to the tokens that follow, by cache size."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import MARKERS, axes, beside, by_cache, policy_colours
from analysis.schema import FULL


def kl_by_budget(runs: pd.DataFrame, *, policies: list[str] | None = None, ax: Axes | None = None) -> Axes:
    """KL(full ‖ evicted) of the next tokens against the cache, a line per policy: the mean over contexts.

    `policies` are by default all without parameters of their own that were measured at several budgets.

    Raises:
        ValueError: there is none.
    """
    ax = axes(ax)
    budgets = runs.groupby("policy")["budget"].nunique()
    names = policies or [
        name for name in dict.fromkeys(runs["policy"]) if name != FULL and ":" not in name and budgets[name] > 1
    ]
    if not names:
        raise ValueError("no policy was measured at several budgets")
    means = runs[runs["policy"].isin(names)].groupby(["policy", "budget"], sort=False)["kl"].mean().reset_index()
    sns.lineplot(
        means,
        x="budget",
        y="kl",
        hue="policy",
        hue_order=names,
        style="policy",
        style_order=names,
        markers=dict(zip(names, MARKERS, strict=False)),
        dashes=False,
        palette=policy_colours(names),
        ax=ax,
    )
    ax.set(xlabel="cache kept", ylabel="KL(full ‖ evicted) of the next tokens (nats)")
    by_cache(ax, means["budget"])
    beside(ax)
    return ax
