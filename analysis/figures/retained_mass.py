"""Where the condition σ > ½ holds: after stage 1 alone, and with everything that was kept."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.style import PALETTE, axes, pair
from analysis.wording import percent

STAGES = {"stage1_mass": "two-stage, after stage 1", "retained_mass": "two-stage, all kept"}
ATTENTION_ONLY = "attention-only, all kept"
_COLOURS = {
    STAGES["stage1_mass"]: "#f3d8a5",
    STAGES["retained_mass"]: PALETTE["two-stage"],
    ATTENTION_ONLY: PALETTE["attention-only"],
}


def retained_mass(heads: pd.DataFrame, *, queries: str = "first", ax: Axes | None = None) -> Axes:
    """σ by budget, a box over contexts, layers and heads; the dashed line is the paper's assumption σ > ½."""
    ax = axes(ax)
    heads = pair(heads)
    chosen = heads[(heads["queries"] == queries) & (heads["norm"] == heads["norm"].iloc[0])]
    staged = chosen[chosen["stage1_mass"].notna()]
    plain = chosen[chosen["stage1_mass"].isna()]
    parts = [
        pd.DataFrame({"budget": staged["budget"], "σ": staged[column], "entries": label}) for column, label in STAGES.items()
    ]
    parts.append(pd.DataFrame({"budget": plain["budget"], "σ": plain["retained_mass"], "entries": ATTENTION_ONLY}))
    long = pd.concat(parts, ignore_index=True)
    order = sorted(long["budget"].unique())
    long["cache"] = long["budget"].map(percent)
    sns.boxplot(
        long,
        x="cache",
        y="σ",
        hue="entries",
        order=[percent(budget) for budget in order],
        palette=_COLOURS,
        whis=(1, 99),
        fliersize=0,
        linewidth=0.8,
        ax=ax,
    )
    ax.axhline(0.5, color="0.3", linewidth=1, linestyle="--")
    ax.set(xlabel="cache kept", ylabel="retained attention mass σ", ylim=(0, 1.02))
    return ax
