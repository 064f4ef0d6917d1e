"""Does less perturbation mean better answers? The change of the score against what an eviction does to attention."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.figures.style import MARKERS, axes, beside, policy_colours
from analysis.schema import FULL

LABELS = {
    "perturbation": "L1 perturbation L of a head's output",
    "relative_perturbation": "L1 perturbation of a layer's attention output, relative to it",
    "theta": "bound θ on L",
    "retained_mass": "retained attention mass σ",
    "kl": "KL(full ‖ evicted), nats",
    "agreement": "top-1 agreement",
}


def score_by_perturbation(samples: pd.DataFrame, *, by: str = "relative_perturbation", ax: Axes | None = None) -> Axes:
    """A point per task, policy and budget: the mean change of the score against the mean of `by`, larger points larger caches.

    Below the dashed line the eviction costs score. `by` is a column of `samples`, such as `perturbation` or `kl`.

    Raises:
        ValueError: there is no such column, or nothing in it.
    """
    if by not in LABELS:
        raise ValueError(f"{by!r} is none of {', '.join(LABELS)}")
    evicted = samples[(samples["policy"] != FULL) & samples[by].notna()]
    if evicted.empty:
        raise ValueError(f"no evicted row has a value of {by}")
    ax = axes(ax)
    means = (
        evicted.assign(change=evicted["score"] - evicted["full_score"])
        .groupby(["task", "policy", "budget"], sort=False)[[by, "change"]]
        .mean()
        .reset_index()
    )
    ranks = means["budget"].rank(method="dense")
    for number, (policy, colour) in enumerate(policy_colours(means["policy"]).items()):
        part = means[means["policy"] == policy]
        ax.scatter(
            part[by],
            part["change"],
            s=18 * ranks[part.index],
            color=colour,
            marker=MARKERS[number % len(MARKERS)],
            alpha=0.75,
            linewidths=0,
            label=policy,
        )
    ax.axhline(0, color="0.3", linestyle="--", linewidth=1)
    if by in ("perturbation", "relative_perturbation", "theta", "kl") and (means[by] > 0).all():
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel=LABELS[by], ylabel="score − score of the full cache")
    beside(ax)
    return ax
