"""The main job, whole: check the input, validate each context, write tables, figures and report."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analysis.errors import InputError, first_line
from analysis.experiments.contexts import Text, texts, tokenised
from analysis.experiments.output import RunFolder
from analysis.experiments.validation import steps, validate_context
from analysis.figures.gallery import gallery
from analysis.report.render import render
from analysis.schema import TABLES
from analysis.settings import ValidationSettings
from hooks.reference import LoadedModel, load

Reporter = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what begins now)."""

VERSIONS = ("criticalkv", "torch", "transformers", "numpy", "pandas")


@dataclasses.dataclass(frozen=True)
class Validation:
    """A finished validation: its tables and where they lie."""

    heads: pd.DataFrame
    layers: pd.DataFrame
    runs: pd.DataFrame
    about: dict[str, Any]
    folder: Path

    @property
    def report(self) -> Path:
        """The HTML file that a person opens."""
        return self.folder / "report.html"


def load_model(settings: ValidationSettings) -> LoadedModel:
    """The model that the settings name, on their device.

    Raises:
        InputError: the device is not there.
        ModelUnavailable: the model cannot be loaded here.
    """
    return load(settings.model, device=available(settings.device), dtype=getattr(torch, settings.dtype))


def available(device: str) -> torch.device:
    """A device that is there.

    Raises:
        InputError: it is not, or holds no numbers.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device} is not available: {first_line(error)}") from error
    if found.type == "meta":
        raise InputError("--device meta holds no numbers to measure; name cpu, cuda or another real device")
    return found


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
    sources = texts(settings)
    folder = RunFolder(
        out, settings.fingerprint([(source.name, source.content) for source in sources], provenance(())["versions"])
    )
    try:
        return _run(settings, folder, sources, loaded, command, report)
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
) -> Validation:
    if loaded is None:
        report(0, 1, "loading the model")
        loaded = load_model(settings)
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    contexts = [tokenised(source, loaded.tokenizer, settings, limit) for source in sources]
    per_context = steps(settings)
    total = per_context * len(contexts) + 1
    tables: list[dict[str, pd.DataFrame]] = []
    checks: list[dict[str, float]] = []
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
            )
            kept = (
                {"heads": result.heads, "layers": result.layers, "runs": result.runs},
                dataclasses.asdict(result.selfcheck),
            )
            folder.finish(number, *kept)
        tables.append(kept[0])
        checks.append(kept[1])
    report(total - 1, total, "figures and report")
    joined = {
        table.name: table.checked(pd.concat([part[table.name] for part in tables], ignore_index=True)) for table in TABLES
    }
    about = {
        "model": {"name": loaded.name, "note": loaded.note},
        "contexts": [context.name for context in contexts],
        "settings": settings.as_dict(),
        "selfcheck": {name: max(check[name] for check in checks) for name in checks[0]},
        "provenance": provenance(command),
    }
    _write(folder, joined, about, loaded.label)
    report(total, total, "done")
    return Validation(joined["heads"], joined["layers"], joined["runs"], about, folder.path)


def _write(folder: RunFolder, tables: dict[str, pd.DataFrame], about: dict[str, Any], label: str) -> None:
    staging = folder.staging()
    for table in TABLES:
        table.write(tables[table.name], staging / table.file, about["model"])
    (staging / "run.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    figures = staging / "figures"
    figures.mkdir()
    pictures = gallery(tables["heads"], tables["layers"], label)
    for picture in pictures:
        picture.save(figures)
    page = render(tables["heads"], tables["runs"], pictures, about, figures)
    (staging / "report.html").write_text(page, encoding="utf-8")
    folder.publish(staging)


def provenance(command: Sequence[str], function: str = "analysis.experiments.run.validate") -> dict[str, Any]:
    """What made this run: the command (or the function that was called), versions, machine."""
    return {
        "command": shlex.join(command) if command else f"{function}(…)",
        "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in VERSIONS}},
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
    }
