"""How all figures look: one palette, one font size, the model's name under each."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import matplotlib
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from analysis.schema import POLICIES
from analysis.wording import percent

# from seaborn's colourblind palette; attention-only is always blue, two-stage always orange
PALETTE = {"attention-only": "#0173b2", "two-stage": "#de8f05"}
NAMES = POLICIES
POLICY_COLOURS = {
    "full": "#4d4d4d",
    "snapkv": "#0173b2",
    "snapkv+two-stage": "#de8f05",
    "adakv+two-stage": "#029e73",
    "fisher": "#d55e00",
    "adakv": "#56b4e9",
    "headkv+two-stage": "#cc78bc",
    "start-recent": "#ca9161",
    "random": "#949494",
}
"""One colour per policy in every figure, from seaborn's colourblind palette."""
OTHERS = ("#fbafe4", "#ece133", "#7f3b08", "#542788", "#35978f", "#80cdc1")
"""For policies without a colour of their own, by the order of their names."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
"""By the order of the policies in a figure, so that they are told apart in grey too."""
QUERY_TITLES = {"window": "window queries", "first": "first decoded token", "later": "later tokens"}


@contextmanager
def style() -> Iterator[None]:
    """The look of the project's figures inside the `with` block; nothing outside it changes."""
    settings = {
        **sns.axes_style("whitegrid"),
        **sns.plotting_context("notebook", font_scale=0.85),
        "svg.hashsalt": "criticalkv",  # the same picture is the same file
        "svg.fonttype": "none",
        "axes.titlesize": "medium",
        "figure.titlesize": "large",
    }
    with matplotlib.rc_context(settings):
        yield


def axes(ax: Axes | None) -> Axes:
    """`ax`, or a new one on a figure of its own, outside pyplot's global state."""
    return ax if ax is not None else Figure(figsize=(6, 4), layout="constrained").subplots()


def pair(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the two policies that a validation compares, at the budgets where both are."""
    rows = rows[rows["policy"].isin(NAMES)]
    both = rows.groupby("budget")["policy"].nunique()
    return rows[rows["budget"].isin(both[both == len(NAMES)].index)]


def policy_colours(policies: Iterable[str]) -> dict[str, str]:
    """The colour of each policy."""
    names = list(dict.fromkeys(policies))
    others = sorted(name for name in names if name not in POLICY_COLOURS)
    return {name: POLICY_COLOURS.get(name) or OTHERS[others.index(name) % len(OTHERS)] for name in names}


def beside(ax: Axes) -> None:
    """The legend of policies beside `ax`, where it hides nothing."""
    ax.legend(title="policy", fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def by_cache(ax: Axes, budgets: Iterable[float]) -> None:
    """Logarithmic axes over the cache kept, marked where something was measured; the other axis marked at 1, 2, 5 of each decade."""
    marks = sorted(set(budgets))
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(marks, [percent(budget) for budget in marks])
    ax.xaxis.minorticks_off()
    plain_log(ax.yaxis)


def plain_log(axis: Axis) -> None:
    """A logarithmic axis marked at 1, 2, 5 of each decade, in plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.minorticks_off()


def unperturbed(ax: Axes) -> Axes:
    """`ax` saying that there is nothing to draw, for budgets at which no head's output changes."""
    ax.text(0.5, 0.5, "no head is perturbed", ha="center", va="center", transform=ax.transAxes, color="0.4")
    ax.set(xticks=[], yticks=[])
    return ax
