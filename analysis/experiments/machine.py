"""Where things run, and what a run says of it: the model on its device, versions, hardware, the command."""

import importlib.metadata
import os
import platform
import shlex
from collections.abc import Sequence
from typing import Any

import torch

from analysis.errors import InputError, first_line
from analysis.settings import ValidationSettings
from hooks.reference import LoadedModel, load

VERSIONS = ("criticalkv", "torch", "transformers", "numpy", "pandas")


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
