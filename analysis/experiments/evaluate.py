"""Tasks answered under policies: every cell of a grid, kept as it comes, and the tables at the end."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.errors import InputError
from analysis.experiments.run import available, load_model, provenance
from analysis.experiments.store import Store
from analysis.experiments.study import Group, check, compute, plan
from analysis.grid import Grid
from analysis.schema import SAMPLES, SCORES, Table
from analysis.scores import scores
from analysis.settings import ValidationSettings
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
    command: Sequence[str] = (),
    report: Reporter = lambda done, total, what: None,
) -> Evaluation:
    """Compute what the folder `out` lacks of a grid, and write its tables: `samples.parquet`, `scores.parquet` and `run.json`.

    Tasks, policies and lengths are checked before a model is loaded. A row is kept as soon as it is there; the same call goes on where it was
    stopped, and another grid's cells join those that are there.

    Args:
        grid: what is asked for.
        out: a folder; new, empty, or an evaluation's.
        loaded: models that are there already, by the names that the grid has.
        command: what the user typed, for `run.json`.
        report: called as cells are done.

    Raises:
        InputError: a setting, a task or the folder does not allow what is asked.
        ModelUnavailable: a model cannot be loaded here.
    """
    check(grid)
    available(grid.device)
    loaded = dict(loaded or {})
    planned = {model: _planned(grid, model, loaded.get(model)) for model in grid.models}
    total = sum(len(group.cells) for groups in planned.values() for group in groups)
    with Store(out) as store:
        store.note(f"grid {len(store.notes('grid'))}", {**grid.as_dict(), **provenance(command)})
        done = store.done()
        count = sum(cell.id in done for groups in planned.values() for group in groups for cell in group.cells)
        report(count, total, "")
        failed: dict[str, str] = {}
        for model, groups in planned.items():
            todo = [group for group in groups if any(cell.id not in done for cell in group.cells)]
            if not todo:
                continue
            if model not in loaded:
                report(count, total, f"loading {model}")
                loaded[model] = load_model(ValidationSettings(model=model, device=grid.device, dtype=grid.dtype))
            for group in todo:
                wanted = {cell.id for cell in group.cells} - done
                report(count, total, group.name)
                for cell, found in compute(loaded[model], grid, group, wanted):
                    if isinstance(found, Exception):
                        failed[cell] = f"{type(found).__name__}: {found}"
                        store.fail(cell, failed[cell])
                    else:
                        store.put(cell, found)
                    count += 1
                    report(count, total, group.name)
            del loaded[model]  # one model at a time
        return _published(store, [group for groups in planned.values() for group in groups], failed, grid, command)


def _planned(grid: Grid, model: str, loaded: LoadedModel | None) -> list[Group]:
    if loaded is None:
        tokenizer, config = load_tokenizer(model)
    else:
        tokenizer, config = loaded.tokenizer, loaded.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return plan(grid, model, tokenizer, getattr(text, "max_position_embeddings", None))


def _published(
    store: Store, groups: Iterable[Group], failed: Mapping[str, str], grid: Grid, command: Sequence[str]
) -> Evaluation:
    """Write the tables of the grid's rows."""
    rows = store.rows(cell.id for group in groups for cell in group.cells)
    if not rows:
        reasons = "; ".join(dict.fromkeys(failed.values()))
        raise InputError(f"no cell could be computed: {reasons}")
    samples = SAMPLES.checked(pd.DataFrame(rows))
    found = scores(samples)
    about = {"settings": grid.as_dict(), "provenance": provenance(command), "failures": dict(failed)}
    try:
        for table, frame in ((SAMPLES, samples), (SCORES, found)):
            _replaced(store.folder / table.file, table, frame)
        aside = store.folder / ".run.json"
        aside.write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        aside.replace(store.folder / "run.json")
    except OSError as error:
        raise InputError(
            f"the tables cannot be written to {store.folder}: {error.strerror or error}; the rows are kept"
        ) from error
    return Evaluation(samples, found, failed, store.folder)


def _replaced(path: Path, table: Table, frame: pd.DataFrame) -> None:
    """The file whole or as it was."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        table.write(frame, aside, {})
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
