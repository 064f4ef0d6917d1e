"""One figure with the sentence that says how to read it, and how figures of several panels are put together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.figures.style import QUERY_TITLES, style

Draw = Callable[[Axes, str, bool], Axes]  # (axes, query set, is it the last panel)


@dataclass(frozen=True)
class Picture:
    """One figure of the gallery: `name` names its files, `reading` says in a sentence how to read it."""

    name: str
    title: str
    reading: str
    figure: Figure

    def save(self, folder: Path) -> None:
        """Write NAME.png and NAME.svg."""
        with style():
            self.figure.savefig(folder / f"{self.name}.png", dpi=150)
            self.figure.savefig(folder / f"{self.name}.svg", metadata={"Date": None})


def query_panels(title: str, label: str, sets: Sequence[str], draw: Draw, *, height: float = 3.9) -> Figure:
    """One panel per query set, side by side on one scale, with one legend beside them."""
    figure = Figure(figsize=(4.2 * len(sets), height), layout="constrained")
    row = figure.subplots(1, len(sets), sharey=True, squeeze=False)[0]
    for ax, queries in zip(row, sets, strict=True):
        last = ax is row[-1]
        draw(ax, queries, last)
        detail = ax.get_title()
        ax.set_title(f"{QUERY_TITLES[queries]}\n{detail}" if detail else QUERY_TITLES[queries])
        if ax is not row[0]:
            ax.set_ylabel("")
        if legend := ax.get_legend():
            handles, names = ax.get_legend_handles_labels()
            heading = legend.get_title().get_text()
            legend.remove()
            if last:
                figure.legend(handles, names, title=heading, loc="outside right center")
    figure.suptitle(title)
    figure.supxlabel(label, fontsize="small", color="0.4")
    return figure


def panels(
    title: str,
    label: str,
    draws: Sequence[Callable[..., object]],
    *,
    size: tuple[float, float] = (4.6, 4.2),
    share: bool = False,
    down: bool = False,
) -> Figure:
    """Panels side by side (`down`: below each other), each drawn by a function that takes `ax`; `size` is that of one, `share` gives them
    one y axis.
    """
    rows, columns = (len(draws), 1) if down else (1, len(draws))
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    row = figure.subplots(rows, columns, sharey=share, squeeze=False).ravel()
    for ax, draw in zip(row, draws, strict=True):
        draw(ax=ax)
        if share and ax is not row[0]:
            ax.set_ylabel("")
    figure.suptitle(title)
    figure.supxlabel(label, fontsize="small", color="0.4")
    return figure
