"""A compressed cache in a file: tensors in safetensors, what else a layer knows as JSON beside them. Nothing is unpickled."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from eviction.cache.compact import KINDS
from eviction.cache.hybrid import HybridLayer
from eviction.cache.ragged import RaggedLayer
from eviction.cache.recent import Recent
from eviction.cache.uniform import EvictedLayer

FORMAT = "criticalkv cache 1"
CLASSES: dict[str, type] = {cls.__name__: cls for cls in (*KINDS, EvictedLayer, RaggedLayer, HybridLayer)}


def save_layers(layers: list[Any], path: str | Path) -> None:
    """Write the layers of a compressed cache.

    Raises:
        ValueError: a layer is of a kind that a compressed cache does not hold.
    """
    tensors: dict[str, Tensor] = {}
    described = [_described(layer, f"{place}.", tensors) for place, layer in enumerate(layers)]
    save_file(tensors, path, metadata={"format": FORMAT, "layers": json.dumps(described)})


def load_layers(path: str | Path, device: str | torch.device) -> list[Any]:
    """Read what `save_layers` wrote.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        opened = safe_open(path, framework="pt", device=str(device))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(f"{path} is no saved cache: {error}") from error
    with opened as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(
                f"{path} is no saved cache of this version: its format is {metadata.get('format')!r}, not {FORMAT!r}"
            )
        # a copy: what is read lies in the file, at an offset at which a product rounds otherwise than on aligned memory
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    return [_made(one, f"{place}.", tensors, torch.device(device)) for place, one in enumerate(json.loads(metadata["layers"]))]


def _described(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    name = type(layer).__name__
    if CLASSES.get(name) is not type(layer):
        raise ValueError(f"layer {prefix[:-1]} is a {name}, which a compressed cache does not hold")
    known = {
        key: _packed(value, f"{prefix}{key}", tensors)
        for key, value in vars(layer).items()
        if key not in ("spans", "_offsets")  # they follow from the counts
    }
    return {"class": name, "fields": known}


def _packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _packed(part, f"{name}.{key}", tensors)] for key, part in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    if isinstance(value, CacheLayerMixin):
        return {"layer": _described(value, f"{name}.", tensors)}
    if isinstance(value, Recent):
        return {
            "recent": {part.name: _packed(getattr(value, part.name), f"{name}.{part.name}", tensors) for part in fields(value)}
        }
    return {"value": value}


def _made(described: dict[str, Any], prefix: str, tensors: dict[str, Tensor], device: torch.device) -> Any:
    if (cls := CLASSES.get(described["class"])) is None:
        raise ValueError(f"the saved cache has a layer of the kind {described['class']!r}, which this version does not know")
    layer: Any = object.__new__(cls)
    vars(layer).update({key: _unpacked(value, f"{prefix}{key}", tensors, device) for key, value in described["fields"].items()})
    if isinstance(layer, RaggedLayer):
        layer.count(layer.counts)
    return layer


def _unpacked(packed: dict[str, Any], name: str, tensors: dict[str, Tensor], device: torch.device) -> Any:
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _unpacked(part, f"{name}.{key}", tensors, device) for key, part in value}
    if kind == "dtype":
        return getattr(torch, value)
    if kind == "device":
        return device
    if kind == "recent":
        return Recent(**{part: _unpacked(inner, f"{name}.{part}", tensors, device) for part, inner in value.items()})
    return _made(value, f"{name}.", tensors, device) if kind == "layer" else value
