"""What a smaller cache costs: the score against the budget, policy by policy."""

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.style import MARKERS, axes, beside, policy_colours
from analysis.schema import FULL
from analysis.statistics import mean_score
from analysis.wording import cache_size


def score_by_budget(samples: pd.DataFrame, *, task: str | None = None, ax: Axes | None = None) -> Axes:
    """Mean score against budget, a line per policy, bars its 95 % interval over samples; dashed the full cache, its interval shaded.

    `task` names one; None takes all of them together.

    Raises:
        ValueError: there is no row of the task, or none of the full cache.
    """
    chosen = samples if task is None else samples[samples["task"] == task]
    full = chosen[chosen["policy"] == FULL]
    if full.empty:
        raise ValueError(f"no row of the full cache for the task {task}")
    ax = axes(ax)
    value, low, high = mean_score(full["score"])
    ax.axhspan(low, high, color="0.85", zorder=0)
    ax.axhline(value, color="0.3", linestyle="--", label="full cache")
    evicted = chosen[chosen["policy"] != FULL]
    budgets = sorted(evicted["budget"].unique())
    colours = policy_colours(evicted["policy"])
    for number, (policy, colour) in enumerate(colours.items()):
        part = evicted[evicted["policy"] == policy]
        found = [mean_score(part.loc[part["budget"] == budget, "score"]) for budget in budgets]
        shift = (number - (len(colours) - 1) / 2) * 0.06  # side by side, so that bars do not hide one another
        ends = [[one.value - one.low for one in found], [one.high - one.value for one in found]]
        ax.errorbar(
            [place + shift for place in range(len(budgets))],
            [one.value for one in found],
            yerr=ends,
            color=colour,
            marker=MARKERS[number % len(MARKERS)],
            capsize=2,
            linewidth=1.5,
            elinewidth=0.8,
            label=policy,
        )
    ax.set_xticks(range(len(budgets)), [cache_size(budget, " entries") for budget in budgets])
    ax.set(xlabel="cache kept", ylabel="score", ylim=(-0.03, 1.03), title=task or "all tasks")
    beside(ax)
    return ax
