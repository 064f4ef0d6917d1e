"""Exact leave-one-out: the KL that each entry's removal causes, in a file that a stopped run goes on from. Runs a model; imported by name."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from perturbation.removal import Removals

FORMAT = "criticalkv leave-one-out 1"
PAUSE = 20.0
"""Seconds between two writes."""

Progress = Callable[[int, int], None]


def leave_one_out(
    removals: Removals,
    layers: Sequence[int] | None = None,
    *,
    batch: int = 64,
    save: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[int, Float[Tensor, "kv_heads entries queries"]]:
    """KL(full ‖ without the entry) of every entry of every KV head, layer by layer, for each token that follows; in nats.

    Exact: each removal is a run of its layer and all above it. Use a model in float64: most of these lie near 1e-8, and drown in
    float32.

    Args:
        removals: the prompt and the tokens that follow.
        layers: decoder layers; None for all.
        batch: removals that are run together.
        save: a file that is written every 20 seconds and when the run ends, however it ends; what it holds is not computed again.
        progress: called with removals done and in all.

    Raises:
        ValueError: a layer does not exist, or the file is of another model, prompt or dtype.
    """
    chosen = range(len(removals.heads)) if layers is None else layers
    if unknown := sorted(set(chosen) - set(range(len(removals.heads)))):
        raise ValueError(f"layers {unknown} do not exist: there are {len(removals.heads)}, counted from 0")
    found = {} if save is None else _read(Path(save), removals)
    queries = removals.following.shape[1]
    for layer in chosen:
        empty = torch.full((removals.heads[layer], removals.entries, queries), torch.nan, dtype=torch.float64)
        found.setdefault(layer, empty)
    total = sum(found[layer][..., 0].numel() for layer in chosen)
    done = sum(int(found[layer][..., 0].isfinite().sum()) for layer in chosen)
    written = time.monotonic()
    try:
        for layer in chosen:
            flat = found[layer].flatten(0, 1)  # as `one_by_one` goes
            start = int(flat[:, 0].isfinite().sum())
            if start == len(flat):
                continue
            for places, behaviour in removals.one_by_one(layer, batch, start=start):
                flat[start : start + len(places)] = behaviour.kl.cpu()
                start, done = start + len(places), done + len(places)
                if progress is not None:
                    progress(done, total)
                if save is not None and time.monotonic() - written > PAUSE:
                    _write(Path(save), removals, found)
                    written = time.monotonic()
    finally:
        if save is not None:
            _write(Path(save), removals, found)
    return {layer: found[layer] for layer in chosen}


def _read(path: Path, removals: Removals) -> dict[int, Tensor]:
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            metadata = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} holds no leave-one-out run: {error}") from error
    of = _of(removals)
    if metadata.get("format") != FORMAT or any(name not in found for name in of):
        raise ValueError(
            f"{path} holds no leave-one-out run of this version: its format is {metadata.get('format')!r}, not {FORMAT!r}"
        )
    for name, own in of.items():
        held = found.pop(name)
        near = 1e-3 if own.is_floating_point() else 0.0
        if held.dtype != own.dtype or held.shape != own.shape or not torch.allclose(held, own, rtol=near, atol=near):
            raise ValueError(
                f"{path} holds a run of another model, dtype or prompt ({name} {tuple(held.shape)} in {held.dtype} differ from "
                f"{tuple(own.shape)} in {own.dtype}); give another file, or remove it"
            )
    return {int(name): one for name, one in found.items()}


def _of(removals: Removals) -> dict[str, Tensor]:
    """What a file belongs to. The model's own logits tell it apart."""
    return {name: getattr(removals, name).cpu().contiguous() for name in ("prompt", "following", "full")}


def _write(path: Path, removals: Removals, found: Mapping[int, Tensor]) -> None:
    """Whole or not at all."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    tensors = {**_of(removals), **{str(layer): one.contiguous() for layer, one in found.items()}}
    save_file(tensors, scratch, metadata={"format": FORMAT})
    scratch.replace(path)
