"""How far a run is: read from its folder, beside whatever writes to it."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.experiments.store import Reading

RECENT = 200
"""Rows by whose times the rate is told."""


@dataclass(frozen=True)
class Status:
    """A run as it is now.

    Attributes:
        total: cells of the grid that was asked for last.
        done: how many of them have a row.
        failures: why others have none, with how many.
        running: whether something writes to the folder.
        what: what is under way, or was when it stopped.
        seconds_left: by the rate of the last rows; None where that is not known.
        last: when the last row came, in seconds since 1970; None where there is none.
        settings: the grid that was asked for last, with command, versions and machine.
    """

    total: int
    done: int
    failures: dict[str, int]
    running: bool
    what: str
    seconds_left: float | None
    last: float | None
    settings: dict[str, Any]


def status(folder: Path, now: float | None = None) -> Status:
    """The run in a folder.

    Raises:
        InputError: the folder holds no run, or its file is damaged.
    """
    now = time.time() if now is None else now
    with Reading(folder) as run:
        notes = run.notes()
        asked = notes.get("asked", {"total": 0, "cells": []})
        cells, done = set(asked["cells"]), run.done()
        failures: dict[str, int] = {}
        for cell, reason in run.failures().items():
            if cell in cells:
                failures[reason] = failures.get(reason, 0) + 1
        times, running = run.times(RECENT), run.writes()
    grids = [value for name, value in notes.items() if name.startswith("grid ")]
    count = len(cells & done)
    left = asked["total"] - count - sum(failures.values())
    began = notes.get("now", {}).get("began", 0.0)
    recent = [at for at in times if at >= began]
    rate = len(recent) / (now - began) if recent and began and len(recent) < RECENT else None
    if len(recent) == RECENT:
        rate = (RECENT - 1) / max(recent[-1] - recent[0], 1e-9)
    return Status(
        asked["total"],
        count,
        failures,
        running,
        notes.get("now", {}).get("what", ""),
        left / rate if rate and running else None,
        times[-1] if times else None,
        grids[-1] if grids else {},
    )
