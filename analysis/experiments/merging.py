"""Runs made into one: what was computed in several folders, or on several machines, side by side."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.errors import InputError
from analysis.experiments.evaluate import publish
from analysis.experiments.store import Reading, Store
from analysis.schema import SAMPLES


def merge(runs: Sequence[Path], out: Path) -> pd.DataFrame:
    """Every row of `runs` in a new folder `out`, with tables of all of them; the runs stay as they are.

    A cell that several runs have must have the same row in each. The new run can be gone on with: what it has is not computed again.

    Raises:
        InputError: a folder holds no run, rows of one cell differ, or rows of the same setting come from other code or data.
    """
    held: dict[str, tuple[dict[str, object], Path]] = {}
    notes: list[dict[str, object]] = []
    for folder in runs:
        with Reading(folder) as run:
            for row in run.rows():
                cell = str(row.pop("cell"))
                if cell in held and _text(held[cell][0]) != _text(row):
                    raise InputError(f"{held[cell][1]} and {folder} have other rows of the cell {cell}: one of them is damaged")
                held.setdefault(cell, (row, folder))
            notes += [{"from": str(folder), **note} for name, note in run.notes("grid ").items()]
    if not held:
        raise InputError("the runs hold no rows")
    frame = pd.DataFrame([{**row, "cell": cell} for cell, (row, _) in held.items()])
    if (twice := frame.duplicated(SAMPLES.keys)).any():
        keys = frame.loc[twice, SAMPLES.keys].iloc[0].to_dict()
        raise InputError(
            f"{int(twice.sum())} rows have the same setting as another, of other code or data, such as {keys}; compare the runs instead"
        )
    with Store(out) as store:
        for number, note in enumerate(notes):
            store.note(f"grid {number}", note)
        for cell, (row, _) in held.items():
            store.put(cell, row)
        store.note("asked", {"total": len(held), "cells": list(held)})
        samples = SAMPLES.checked(frame)
        publish(out, samples, {"merged": [str(folder) for folder in runs], "runs": notes})
    return samples


def _text(row: dict[str, object]) -> str:
    return json.dumps(row, sort_keys=True)
