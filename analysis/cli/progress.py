"""The progress bar that every long command shows."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def progress_bar(console: Console, *, remaining: bool = False) -> Progress:
    """What is being done, a bar, steps done of all, and the time, with `remaining` what is left of it too; gone when the work is."""
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()]
    columns.append(TimeElapsedColumn())
    if remaining:
        columns += [TextColumn("left:"), TimeRemainingColumn()]
    return Progress(*columns, console=console, transient=True)
