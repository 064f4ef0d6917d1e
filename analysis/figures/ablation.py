"""What a setting does to the perturbation: each variant of an ablation against its first."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.ablations import Ablation
from analysis.figures.style import axes, percent
from analysis.summary import variant_change


def ablation(heads: pd.DataFrame, asked: Ablation, *, queries: str = "first", norm: str = "L1", ax: Axes | None = None) -> Axes:
    """Change of ΣL (over layers and heads) of each variant against the first: a small point per context, the mean and its range of one
    standard error. Variants are held against the first at the same budget; one column per budget where there are several.

    Raises:
        ValueError: the rows have none of its variants.
    """
    change = variant_change(heads, asked, norm=norm)
    change = change[change["queries"] == queries]
    if change.empty:
        raise ValueError(f"there are no rows of the ablation {asked.name!r} for the queries {queries!r}")
    ax = axes(ax)
    labels = [label for label in asked.variants if label in set(change["variant"])]
    budgets = sorted(change["budget"].unique())
    change = change.assign(cache=change["budget"].map(percent), total=100 * change["total_change"])
    colours = sns.color_palette("viridis", len(budgets)) if len(budgets) > 1 else ["#de8f05"]
    order = [percent(budget) for budget in budgets]
    several = {"hue": "cache", "hue_order": order, "palette": list(colours), "dodge": 0.5 if len(budgets) > 1 else False}
    sns.stripplot(change, x="total", y="variant", order=labels, size=3, alpha=0.5, jitter=False, legend=False, ax=ax, **several)
    sns.pointplot(
        change, x="total", y="variant", order=labels, errorbar="se", linestyle="none", markersize=6, capsize=0.15,
        legend=len(budgets) > 1, ax=ax, **several,
    )  # fmt: skip
    ax.axvline(0, color="0.3", linewidth=1, linestyle="--")
    ax.set(xlabel=f"change of Σ {norm} perturbation against {next(iter(asked.variants))} (%)", ylabel="")
    if len(budgets) == 1:
        ax.set_title(f"{order[0]} cache")
    return ax
