"""How the command line shows a table."""

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    title: str | None = None,
    *,
    left: int = 1,
    fold: Collection[str] = (),
) -> Table:
    """Rows under their columns: the first `left` columns to the left, those after them, which are numbers, to the right.

    Columns named in `fold` are broken over lines where the terminal is narrow; no other is. Text is shown as it is, never read as markup.
    """
    made = Table(title=None if title is None else Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        folds = name in fold
        made.add_column(
            name,
            justify="left" if number < left else "right",
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
        )
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made


def cache_size(budget: float) -> str:
    """0.05 as "5 %", 512 as "512"."""
    return f"{budget:g}" if budget > 1 else f"{100 * budget:.3g} %"
