"""Tasks answered under policies: every cell of a grid, kept as it comes, and the tables at the end."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.errors import InputError
from analysis.experiments.engines import Engine, Job, Local
from analysis.experiments.machine import available, provenance
from analysis.experiments.store import Store
from analysis.experiments.study import Group, check, plan
from analysis.grid import Grid
from analysis.schema import SAMPLES, SCORES
from analysis.scores import scores
from hooks.reference import LoadedModel, load_tokenizer

Reporter = Callable[[int, int, str], None]
"""Called with (cells done, cells in all, what is under way)."""


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation: its tables, where they lie, and the cells that could not be computed, with the reasons."""

    samples: pd.DataFrame
    scores: pd.DataFrame
    failures: Mapping[str, str]
    folder: Path


def evaluate(
    grid: Grid,
    out: Path,
    *,
    loaded: Mapping[str, LoadedModel] | None = None,
    engine: Engine | None = None,
    command: Sequence[str] = (),
    report: Reporter = lambda done, total, what: None,
) -> Evaluation:
    """Compute what the folder `out` lacks of a grid, and write its tables: `samples.parquet`, `scores.parquet` and `run.json`.

    Tasks, policies and lengths are checked before a model is loaded. A row is kept as soon as it is there; the same call goes on where it was
    stopped. Another grid may be asked of the same folder: its rows are added, and the tables are of the grid that was asked for last.

    Args:
        grid: what is asked for.
        out: a folder; new, empty, or an evaluation's.
        loaded: models that are there already, by the names that the grid has.
        engine: where cells are computed; None: in this process.
        command: what the user typed, for `run.json`.
        report: called as cells are done.

    Raises:
        InputError: a setting, a task or the folder does not allow what is asked.
        ModelUnavailable: a model cannot be loaded here.
    """
    check(grid)
    if grid.device_map is None and engine is None:
        available(grid.device)
    loaded = dict(loaded or {})
    engine = engine or Local(loaded)
    groups = [group for model in grid.models for group in _planned(grid, model, loaded.get(model))]
    total = sum(len(group.cells) for group in groups)
    with Store(out) as store:
        done = store.done()
        lacking = [Job(group, frozenset(cell.id for cell in group.cells) - done) for group in groups]
        jobs = [job for job in lacking if job.wanted]
        count = total - sum(len(job.wanted) for job in jobs)
        made_by = provenance(command, f"{__name__}.evaluate")
        store.note(f"grid {len(store.notes('grid '))}", {**grid.as_dict(), **made_by})
        store.note("asked", {"total": total, "cells": [cell.id for group in groups for cell in group.cells]})
        began = time.time()

        def begins(what: str) -> None:
            store.note("now", {"what": what, "began": began})
            report(count, total, what)

        report(count, total, "")
        failed: dict[str, str] = {}
        for group, cell, found in engine.run(grid, jobs, begins):
            if isinstance(found, str):
                failed[cell] = found
                store.fail(cell, found)
            else:
                store.put(cell, found)
            count += 1
            report(count, total, group.name)
        return _published(store, groups, failed, {"settings": grid.as_dict(), "provenance": made_by})


def _planned(grid: Grid, model: str, loaded: LoadedModel | None) -> list[Group]:
    if loaded is None:
        tokenizer, config = load_tokenizer(model)
    else:
        tokenizer, config = loaded.tokenizer, loaded.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return plan(grid, model, tokenizer, getattr(text, "max_position_embeddings", None))


def _published(store: Store, groups: Iterable[Group], failed: Mapping[str, str], about: Mapping[str, Any]) -> Evaluation:
    """Write the tables of the grid's rows."""
    rows = store.rows(cell.id for group in groups for cell in group.cells)
    if not rows:
        reasons = "; ".join(dict.fromkeys(failed.values()))
        raise InputError(f"no cell could be computed: {reasons}")
    samples = SAMPLES.checked(pd.DataFrame(rows))
    found = publish(store.folder, samples, {**about, "failures": dict(failed)})
    return Evaluation(samples, found, failed, store.folder)


def publish(folder: Path, samples: pd.DataFrame, about: Mapping[str, Any]) -> pd.DataFrame:
    """Write `samples.parquet`, `scores.parquet` (which is returned) and `run.json`, each whole or as it was.

    Raises:
        InputError: the folder does not take them; the rows are kept.
    """
    found = scores(samples)
    try:
        for table, frame in ((SAMPLES, samples), (SCORES, found)):
            with _aside(folder / table.file) as path:
                table.write(frame, path, {})
        with _aside(folder / "run.json") as path:
            path.write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"the tables cannot be written to {folder}: {error.strerror or error}; the rows are kept") from error
    return found


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` when that went well."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
