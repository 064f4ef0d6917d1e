"""The commands that a ledger names for what a run has not measured, with that run's own model, texts and settings."""

import shlex
from collections.abc import Mapping
from typing import Any

from analysis.settings import ValidationSettings

SHARED = ("model", "context_files", "passages", "context_length", "window", "later", "seed", "device", "dtype")
"""Settings that `validate` and `ablate` both take."""
OWN = ("kernel", "pooling", "budgets", "alpha", "epsilon")
"""Those that `validate` alone takes."""


def completed(command: str, settings: Mapping[str, Any]) -> str:
    """`command` with `{run}` and `{model}` filled in by a run's settings where they are not the defaults.

    Args:
        command: of a claim.
        settings: as `run.json` has them.
    """
    names = SHARED if command.startswith("criticalkv ablate") else SHARED + OWN
    return command.replace("{run}", _options(names, settings)).replace("{model}", _options(("model",), settings))


def _options(names: tuple[str, ...], settings: Mapping[str, Any]) -> str:
    default = ValidationSettings().as_dict()
    given = [(name, settings[name]) for name in names if name in settings and settings[name] != default[name]]
    return "".join(f" {option}" for name, value in given for option in _written(name, value))


def _written(name: str, value: Any) -> list[str]:
    if name == "context_files":
        return [f"--context {shlex.quote(file)}" for file in value]
    text = ",".join(f"{part:g}" for part in value) if isinstance(value, list) else str(value)
    return [f"--{name.replace('_', '-')} {shlex.quote(text)}"]
