"""What a setting does to the perturbation: each variant of an ablation against its first."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.ablations import Ablation
from analysis.figures.style import axes
from analysis.summary import variant_change
from analysis.wording import percent

COLOUR = "#de8f05"


def ablation(heads: pd.DataFrame, asked: Ablation, *, queries: str = "first", norm: str = "L1", ax: Axes | None = None) -> Axes:
    """Change of ΣL (over layers and heads) of each variant against the first at the same budget: a small point per context, a large one for
    their mean, a bar of one standard error to each side.

    Raises:
        ValueError: the rows have none of its variants.
    """
    change = variant_change(heads[heads["queries"] == queries], asked, norm=norm)
    if change.empty:
        raise ValueError(f"there are no rows of the ablation {asked.name!r} for the queries {queries!r}")
    ax = axes(ax)
    labels = [label for label in asked.variants if label in set(change["variant"])]
    budgets = sorted(change["budget"].unique())
    caches = [percent(budget) for budget in budgets]
    change = change.assign(cache=change["budget"].map(percent), total=100 * change["total_change"])
    # a single variant at several budgets has a line for each budget; several at several have a colour for each
    down, order = ("cache", caches) if len(labels) == 1 and len(budgets) > 1 else ("variant", labels)
    coloured = down == "variant" and len(budgets) > 1
    several = {"hue": "cache", "hue_order": caches, "palette": "viridis", "dodge": 0.5} if coloured else {"color": COLOUR}
    sns.stripplot(change, x="total", y=down, order=order, size=3, alpha=0.5, jitter=False, legend=False, ax=ax, **several)
    sns.pointplot(
        change, x="total", y=down, order=order, errorbar="se", linestyle="none", markersize=6, capsize=0.15, legend=coloured, ax=ax,
        **several,
    )  # fmt: skip
    ax.axvline(0, color="0.3", linewidth=1, linestyle="--")
    ax.set(xlabel=f"change of ΣL in {norm} (%)", ylabel="cache kept" if down == "cache" else "")
    ax.set_title(f"against {next(iter(asked.variants))}" + (f", {caches[0]} cache" if len(budgets) == 1 else ""))
    return ax
