"""What a policy left of a prefilled cache."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers.cache_utils import Cache

from eviction.cache.broken import BrokenLayer
from eviction.cache.compact import compact, kind_of
from eviction.cache.hybrid import entries_of
from eviction.cache.ragged import RaggedLayer
from eviction.cache.recent import Recent
from eviction.cache.saving import load_layers, save_layers
from hooks.errors import UnsupportedAttention


class EvictedCache(Cache):
    """What a policy left of a prefilled cache; goes where a cache goes (`model(…)`, `model.generate(…)`).

    Where all rows, heads and layers hold the same number of entries, stock kernels read it as it is. Else it is `ragged`: stored flat, and
    read inside `with eviction.reading(model):`.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers=list(layers))

    @property
    def ragged(self) -> bool:
        """Whether it must be read inside `with eviction.reading(model):`."""
        return any(isinstance(entries_of(layer), RaggedLayer) for layer in self.layers)

    @classmethod
    def compacted(
        cls,
        cache: Cache,
        keep: Sequence[Bool[Tensor, "batch _ seen"] | None],
        *,
        padding: Bool[Tensor, "batch seen"] | None = None,
        latent: Collection[int] = (),
        consume: bool = False,
    ) -> "EvictedCache":
        """Copy the kept entries of `cache`, a prefilled cache that stays as it is, in ascending order of position.

        Kept keys keep the rotation of their true positions, and what is written next goes on at the true length. Equal to
        the full cache with the other entries masked, up to the rounding of sums of another length; where everything is kept, bit for bit.

        Args:
            cache: a `DynamicCache` of full, sliding-window or linear attention, or a mixture, compressed before or not.
            keep: for each layer of the cache which of the tokens seen stay; None for a layer without entries (linear attention, or layers that
                read another's). What a sliding window or an eviction before has dropped already is not looked at.
            padding: False where a row of the batch has a pad. Needed if there are any.
            latent: layers whose entries the model expands before attention (MLA in newer transformers: one cached head).
            consume: free each layer of `cache` as soon as it was copied, so that one layer at most is held twice; `cache` is empty then, and
                must not be used (linear states are handed over).

        Raises:
            ValueError: a mask does not fit its layer, or keeps nothing of a head.
            UnsupportedAttention: a layer is of another kind (sparse-index attention, quantised or static caches).
        """
        cls.require_support(cache)
        return cls(compact(cache.layers, keep, padding=padding, latent=latent, consume=consume))

    @staticmethod
    def require_support(cache: Cache) -> None:
        """Refuse, before any work, a cache that cannot be compacted: `cache` as made for the model, empty or not.

        Raises:
            UnsupportedAttention: a layer is of a kind that cannot be, none holds entries, or the cache is offloaded.
        """
        if not isinstance(getattr(cache, "layers", None), list):
            raise UnsupportedAttention(
                f"a {type(cache).__name__} cannot be compacted: paged caches share blocks between heads, and caches of an encoder and a "
                "decoder hold two; a DynamicCache can be"
            )
        if getattr(cache, "offloading", False):
            raise UnsupportedAttention("an offloaded cache cannot be compacted; make one without offloading")
        kinds = [kind_of(index, layer) for index, layer in enumerate(cache.layers)]
        if kinds and set(kinds) == {"none"}:
            raise UnsupportedAttention("no layer of the model keeps entries of attention: there is nothing to evict")

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Take tokens back in every layer, or in none where one refuses."""
        parts = [
            part for layer in self.layers for part in {id(layer): layer, id(entries_of(layer)): entries_of(layer)}.values()
        ]
        before = [
            {name: dict(value) if isinstance(value, dict) else value for name, value in vars(part).items()} for part in parts
        ]
        try:
            super().crop(*args, **kwargs)
        except BaseException:
            for part, state in zip(parts, before, strict=True):
                vars(part).update(state)
            raise

    def forget(self) -> None:
        """Let go of the last queries, which layers carry along for an `evicting` block."""
        for layer in self.layers:
            vars(entries_of(layer)).pop("recent", None)

    def save(self, path: str | Path) -> None:
        """Write the cache to one safetensors file: what it holds, bit for bit, and what its layers know."""
        save_layers(self.layers, path)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> "EvictedCache":
        """A cache that was saved, to go on with on the model that it came from.

        Raises:
            ValueError: the file is no saved cache.
        """
        return cls(load_layers(path, device))

    @property
    def entries(self) -> float:
        """Entries held by each KV head of each layer now; where they differ, their mean."""
        held = [count for layer in self.layers for count in _counts(entries_of(layer))]
        mean = sum(held) / len(held)
        return int(mean) if mean == int(mean) else mean

    @property
    def nbytes(self) -> int:
        """Bytes that the cache keeps alive, by the storages behind its tensors."""
        return cache_bytes(self)


def cache_bytes(cache: Cache) -> int:
    """Bytes that a cache keeps alive: each storage behind its keys, values, slots and states counted once, whole."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in _tensors(layer)
    }
    return sum(storages.values())


def full_bytes(cache: Cache) -> int:
    """Bytes that a cache would hold had nothing been evicted: keys and values of all tokens seen (within a sliding window), and its states."""
    total, layers = 0, list[Any](cache.layers)
    for layer in layers:
        entries = entries_of(layer)
        keys, values = getattr(entries, "keys", None), getattr(entries, "values", None)
        if keys is not None and values is not None:
            window = getattr(entries, "window", None) or getattr(entries, "sliding_window", None)
            length = layer.get_seq_length() if window is None else min(layer.get_seq_length(), window - 1)
            total += sum(
                part.shape[0] * part.shape[1] * length * part.shape[3] * part.element_size() for part in (keys, values)
            )
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, None)  # one, or several by their index, with releases
            parts = states.values() if isinstance(states, dict) else [states]
            total += sum(part.nbytes for part in parts if part is not None)
    return total


def _tensors(layer: Any) -> Iterator[Tensor]:
    for name, value in (*vars(layer).items(), *vars(entries_of(layer)).items()):
        for part in value.values() if isinstance(value, dict) else (value,):
            if isinstance(part, Tensor) and not name.startswith("_"):
                yield part
            elif isinstance(part, Recent):
                yield from part.tensors


def _counts(layer: Any) -> list[int]:
    """Entries of each row and KV head."""
    if isinstance(layer, RaggedLayer):
        assert layer.keys is not None
        return [count + layer.keys.shape[2] for row in layer.counts for count in row]
    if isinstance(layer, BrokenLayer):
        layer.refuse()
    keys = getattr(layer, "keys", None)
    return [] if keys is None else [keys.shape[2]] * keys.shape[0] * keys.shape[1]
