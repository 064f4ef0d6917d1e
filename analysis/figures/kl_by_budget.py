"""What policies' choices do to the tokens that follow, by cache size."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import MARKERS, axes, beside, percent, policy_colours
from analysis.schema import FULL


def kl_by_budget(runs: pd.DataFrame, *, policies: list[str] | None = None, ax: Axes | None = None) -> Axes:
    """KL(full ‖ evicted) of the next tokens against the cache, a line per policy: the mean over contexts.

    `policies` are all without parameters of their own by default.
    """
    ax = axes(ax)
    names = policies or [name for name in dict.fromkeys(runs["policy"]) if name != FULL and ":" not in name]
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
    budgets = sorted(means["budget"].unique())
    ax.set(xscale="log", yscale="log", xlabel="cache kept", ylabel="KL(full ‖ evicted) of the next tokens (nats)")
    ax.set_xticks(budgets, [percent(budget) for budget in budgets])
    ax.minorticks_off()
    beside(ax)
    return ax
