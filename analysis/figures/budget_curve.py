"""How much is perturbed at each cache size."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import NAMES, PALETTE, axes, by_cache, unperturbed


def budget_curve(
    heads: pd.DataFrame,
    *,
    queries: str = "first",
    norm: str = "L1",
    variants: dict[str, str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Mean L over layers and heads against the cache, a line per selection; bands: range over the contexts.

    `variants` names the two policies of the rows that stand for attention-only and two-stage; by default the compared pair.
    """
    ax = axes(ax)
    names = variants or NAMES
    chosen = heads[heads["policy"].isin(names) & (heads["queries"] == queries) & (heads["norm"] == norm)]
    means = chosen.groupby(["context", "policy", "budget"])["perturbation"].mean().reset_index()
    means = means[means["perturbation"] > 0]
    if means.empty:
        return unperturbed(ax)
    means["selection"] = means["policy"].map(names)
    sns.lineplot(
        means,
        x="budget",
        y="perturbation",
        hue="selection",
        style="selection",
        markers=["o", "^"],
        dashes=False,
        palette=PALETTE,
        errorbar=("pi", 100),
        ax=ax,
    )
    ax.set(xlabel="cache kept", ylabel=f"mean {norm} perturbation of a head")
    by_cache(ax, means["budget"])
    return ax
