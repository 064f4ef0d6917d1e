"""The main job, whole: check the input, validate each context, write tables, figures and report."""

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from analysis.claims import ledger
from analysis.comparison import read_run
from analysis.errors import InputError
from analysis.experiments.choices import choices
from analysis.experiments.contexts import Text, at_every_length, texts
from analysis.experiments.evaluate import evaluate
from analysis.experiments.machine import load_model, provenance
from analysis.experiments.needles import measure_heads
from analysis.experiments.output import RunFolder
from analysis.experiments.validation import steps, validate_context
from analysis.grid import Grid
from analysis.report.making import write_report
from analysis.schema import CLAIMS, ENTRIES, HEADS, LAYERS, RUNS, SAMPLES, TABLES
from analysis.settings import ValidationSettings
from hooks.reference import LoadedModel

Reporter = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what begins now)."""

HEAD_CONTEXTS = 8
"""Contexts with a needle, by which HeadKV's head scores are measured in a full validation."""
ANSWERED = 5
"""Samples of each of RULER's tasks in a full validation."""
SCORED = "head-scores.json"
"""The file of a full validation's head scores."""
COPIED = 1e9
"""Parameters up to which a model is copied in float64 for exact removals of single entries (8 GB)."""


@dataclasses.dataclass(frozen=True)
class Validation:
    """A finished validation: its tables and where they lie."""

    tables: dict[str, pd.DataFrame]
    """By name, as `analysis.schema.TABLES` and `CLAIMS` declare them."""
    about: dict[str, Any]
    folder: Path

    @property
    def heads(self) -> pd.DataFrame:
        """Rows of the table `heads`."""
        return self.tables[HEADS.name]

    @property
    def layers(self) -> pd.DataFrame:
        """Rows of the table `layers`."""
        return self.tables[LAYERS.name]

    @property
    def runs(self) -> pd.DataFrame:
        """Rows of the table `runs`."""
        return self.tables[RUNS.name]

    @property
    def claims(self) -> pd.DataFrame:
        """The ledger."""
        return self.tables[CLAIMS.name]

    @property
    def report(self) -> Path:
        """The HTML file that a person opens."""
        return self.folder / "report.html"


def validate(
    settings: ValidationSettings,
    out: Path,
    *,
    loaded: LoadedModel | None = None,
    command: Sequence[str] = (),
    report: Reporter = lambda done, total, step: None,
) -> Validation:
    """Run a validation into the folder `out`, or go on with the one that was stopped there.

    Input is checked before anything is written; a context's rows are kept as soon as it is done.

    Raises:
        InputError: a text, the model's limits or the folder do not allow what the settings ask.
        ModelUnavailable, UnsupportedAttention: the model cannot be loaded, or not be captured exactly.
        SelfCheckFailed: the model is not reproduced; nothing is kept.
    """
    answers = None if settings.answers is None else of_model(read_run(settings.answers), settings)
    choices(settings)  # its mistakes are told before the model is loaded
    sources = texts(settings)
    folder = RunFolder(
        out, settings.fingerprint([(source.name, source.content) for source in sources], provenance(())["versions"])
    )
    try:
        return _run(settings, folder, sources, loaded, command, report, answers)
    except BaseException:
        folder.abandon()
        raise


def _run(
    settings: ValidationSettings,
    folder: RunFolder,
    sources: list[Text],
    loaded: LoadedModel | None,
    command: Sequence[str],
    report: Reporter,
    answers: pd.DataFrame | None,
) -> Validation:
    if loaded is None:
        report(0, 1, "loading the model")
        loaded = load_model(settings)
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    by_text = [at_every_length(source, loaded.tokenizer, settings, limit) for source in sources]
    contexts = [context for one in by_text for context in one]
    exact, why = in_float64(loaded, settings)
    per_context = steps(settings)
    total = per_context * len(contexts) + 1
    tables: list[dict[str, pd.DataFrame]] = []
    notes: list[dict[str, Any]] = []
    for number, context in enumerate(contexts):
        start = number * per_context
        kept = folder.finished(number)
        if kept is None:
            counter = iter(range(start, start + per_context))
            result = validate_context(
                loaded,
                context,
                settings,
                lambda step, counter=counter, name=context.name: report(next(counter), total, f"{name}: {step}"),  # type: ignore[misc]
                exact,
            )
            kept = result.tables, {"selfcheck": dataclasses.asdict(result.selfcheck), "refused": result.refused}
            folder.finish(number, *kept)
        tables.append(kept[0])
        notes.append(kept[1])
    if settings.full:
        answers = answered(settings, loaded, folder.progress, report)
    report(total - 1, total, "figures and report")
    joined = {table.name: table.checked(_joined([part[table.name] for part in tables])) for table in TABLES}
    about = {
        "model": {"name": loaded.name, "note": loaded.note},
        "contexts": [context.name for context in contexts],
        "independent": [one[-1].name for one in by_text],
        "settings": settings.as_dict(),
        "selfcheck": {name: max(note["selfcheck"][name] for note in notes) for name in notes[0]["selfcheck"]},
        "refused": why | {name: reason for note in notes for name, reason in note["refused"].items()},
        "provenance": provenance(command),
    }
    if answers is not None:
        joined[SAMPLES.name] = answers
    joined[CLAIMS.name] = ledger(joined, about)
    _write(folder, joined, about)
    report(total, total, "done")
    return Validation(joined, about, folder.path)


def answered(settings: ValidationSettings, loaded: LoadedModel, folder: Path, report: Reporter) -> pd.DataFrame:
    """RULER's tasks at 40 % cache, in this model's answers: rows of the table `samples`.

    HeadKV's head scores are measured first, into the file `SCORED` of the folder; rows name its policies without that file.
    """
    scores = folder / SCORED
    if not scores.is_file():
        measure_heads(
            loaded, contexts=HEAD_CONTEXTS, context_length=settings.context_length, measure="headkv", seed=settings.seed
        ).save(scores)
    tail = f":scores={scores}"
    grid = Grid(
        models=(loaded.name,),
        tasks=("ruler-offline",),
        lengths=(settings.context_length,),
        samples=ANSWERED,
        policies=("snapkv", "snapkv+two-stage", "adakv", "adakv+two-stage", f"headkv{tail}", f"headkv+two-stage{tail}"),
        budgets=(0.4,),
        seeds=(settings.seed,),
        device=settings.device,
        dtype=settings.dtype,
    )
    rows = evaluate(grid, folder / "answers", loaded={loaded.name: loaded}, report=report).samples
    return rows.assign(policy=rows["policy"].str.removesuffix(tail))


def of_model(answers: pd.DataFrame, settings: ValidationSettings) -> pd.DataFrame:
    """The answers of the model that is validated.

    Raises:
        InputError: all are another's.
    """
    own = answers[answers["model"] == settings.model]
    if own.empty:
        others = ", ".join(sorted(answers["model"].unique()))
        raise InputError(f"--answers {settings.answers} holds answers of {others}; none of {settings.model}")
    return own.reset_index(drop=True)


def in_float64(loaded: LoadedModel, settings: ValidationSettings) -> tuple[nn.Module | None, dict[str, str]]:
    """A copy of the model in float64, where single removals are measured; else why there is none, by table."""
    if not settings.leave_one_out:
        return None, {ENTRIES.name: "--leave-one-out 0"}
    count = sum(one.numel() for one in loaded.model.parameters())
    if count > COPIED:
        return None, {ENTRIES.name: f"the model's {count / 1e9:.1f} billion parameters are too many for a copy in float64"}
    return copy.deepcopy(loaded.model).double(), {}


def _write(folder: RunFolder, tables: dict[str, pd.DataFrame], about: dict[str, Any]) -> None:
    staging = folder.staging()
    for table in (*TABLES, CLAIMS, *([SAMPLES] if SAMPLES.name in tables else [])):
        table.write(tables[table.name], staging / table.file, about["model"])
    (staging / "run.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if (folder.progress / SCORED).is_file():
        shutil.copyfile(folder.progress / SCORED, staging / SCORED)
    write_report(tables, about, staging)
    folder.publish(staging)


def _joined(parts: list[pd.DataFrame]) -> pd.DataFrame:
    """The rows of all contexts; those that have none say nothing of the columns' types."""
    return pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
