"""How the command line shows a table."""

from collections.abc import Collection, Iterable, Sequence
from textwrap import wrap

from rich import box
from rich.cells import cell_len
from rich.console import Console
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

    Cells of columns named in `fold` are broken over lines where the terminal is narrow; no others are. Text is shown as it is, never read as
    markup.
    """
    shown = [[str(cell) for cell in row] for row in rows]
    folds = [name in fold for name in columns]
    cells = [max((cell_len(row[number]) for row in shown), default=0) for number in range(len(columns))]
    made = Table(title=None if title is None else Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, (name, folded) in enumerate(zip(_headings(columns, cells, folds), folds, strict=True)):
        made.add_column(
            name, justify="left" if number < left else "right", no_wrap=not folded, overflow="fold" if folded else "ellipsis"
        )
    for row in shown:
        made.add_row(*map(Text, row))
    return made


def _headings(columns: Sequence[str], cells: Sequence[int], folds: Sequence[bool]) -> list[str]:
    """The headings, broken between words where the table is wider than the terminal: first the one that is broader than its cells by most."""
    found = list(columns)
    room = Console().width - len(columns) - 2
    for _ in columns:
        widths = [max(map(cell_len, name.split("\n"))) for name in found]
        if sum(0 if folded else max(pair) for folded, *pair in zip(folds, widths, cells, strict=True)) <= room:
            break
        number = max(range(len(columns)), key=lambda place: 0 if folds[place] else widths[place] - cells[place])
        longest = max(map(len, columns[number].split()), default=1)
        found[number] = "\n".join(wrap(columns[number], max(cells[number], longest)))
    return found
