"""How all figures look: one palette, one font size, the model's name under each."""

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.schema import POLICIES

# from seaborn's colourblind palette; attention-only is always blue, two-stage always orange
PALETTE = {"attention-only": "#0173b2", "two-stage": "#de8f05"}
NAMES = POLICIES
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


def percent(value: float) -> str:
    """0.05 as "5 %", to three digits."""
    return f"{100 * value:.3g} %"


def unperturbed(ax: Axes) -> Axes:
    """`ax` saying that there is nothing to draw, for budgets at which no head's output changes."""
    ax.text(0.5, 0.5, "no head is perturbed", ha="center", va="center", transform=ax.transAxes, color="0.4")
    ax.set(xticks=[], yticks=[])
    return ax
