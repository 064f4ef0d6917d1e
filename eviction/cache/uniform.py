"""A cache that holds the kept entries and nothing else, for masks that keep the same number in every head and layer."""

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from hooks.errors import UnsupportedAttention


class EvictedLayer(DynamicLayer):
    """One layer's kept entries, and how many were dropped before them.

    It says that it is as long as what was seen (`get_seq_length`), so that positions go on where the prompt ended, and that
    it holds what it holds (`get_mask_sizes`): kept entries stand in front of what comes, all visible to it.
    """

    def __init__(
        self,
        keys: Float[Tensor, "batch kv_heads kept head_dim"],
        values: Float[Tensor, "batch kv_heads kept value_dim"],
        dropped: int,
    ) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.dropped = dropped
        self.kept = keys.shape[-2]

    def get_seq_length(self) -> int:
        """Tokens seen: those held and those dropped."""
        assert self.keys is not None
        return self.keys.shape[-2] + self.dropped

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that attention will see, and the position at which they begin to count."""
        return self.get_seq_length() - self.dropped + query_length, self.dropped

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last −`tokens_to_remove` tokens, as far as they were written after the eviction.

        Raises:
            ValueError: it would reach into the compressed prompt, whose dropped entries are gone.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the negative of the number of tokens to take back, not {tokens_to_remove}")
        assert self.keys is not None
        written = self.keys.shape[-2] - self.kept
        if -tokens_to_remove > written:
            raise ValueError(
                f"cannot take back {-tokens_to_remove} tokens: only {written} were written after the eviction, and the "
                "entries dropped from the prompt are gone; prefill the shorter prompt instead"
            )
        # not DynamicLayer's: releases differ in what they take, and count by get_seq_length, which here includes what was dropped
        assert self.values is not None
        held = self.keys.shape[-2] + min(tokens_to_remove, 0)
        self.keys, self.values = self.keys[..., :held, :], self.values[..., :held, :]

    def reset(self) -> None:
        """Not possible: an evicted layer without its entries is nothing.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("an evicted cache cannot be reset to empty; make a new DynamicCache and prefill again")


class EvictedCache(Cache):
    """What a policy left of a prefilled cache; goes where a cache goes (`model(…)`, `model.generate(…)`)."""

    def __init__(self, layers: list[EvictedLayer]) -> None:
        super().__init__(layers=list(layers))

    @classmethod
    def compacted(cls, cache: Cache, keep: Sequence[Bool[Tensor, "batch kv_heads keys"]]) -> "EvictedCache":
        """Copy the kept entries of `cache`, a prefilled cache that stays as it is, in ascending order of position.

        Kept keys keep the rotation of their true positions, and what is written next goes on at the true length. Equal to
        the full cache with the other entries masked, up to the rounding of sums of another length.

        Raises:
            ValueError: a mask does not fit its layer, or heads, rows or layers would keep different numbers of entries.
            UnsupportedAttention: a layer is not a plain dynamic one (sliding windows, quantised or static caches).
        """
        if len(keep) != len(cache.layers):
            raise ValueError(f"{len(keep)} keep-masks for a cache of {len(cache.layers)} layers")
        cls.require_support(cache)
        layers = [
            _compact(cast(DynamicLayer, layer), mask, index)
            for index, (layer, mask) in enumerate(zip(cache.layers, keep, strict=True))
        ]
        sizes = {layer.kept for layer in layers}
        if len(sizes) > 1:
            raise ValueError(f"layers would keep different numbers of entries ({sorted(sizes)}); this cache is uniform")
        return cls(layers)

    @staticmethod
    def require_support(cache: Cache) -> None:
        """Refuse, before any work, a cache that cannot be compacted: `cache` as made for the model, empty or not.

        Raises:
            UnsupportedAttention: a layer is not a plain dynamic one (a sliding window, linear attention, quantised or static).
        """
        for index, layer in enumerate(cache.layers):
            if type(layer) is not DynamicLayer:
                raise UnsupportedAttention(
                    f"layer {index} of the cache is a {type(layer).__name__}; full-attention layers of a DynamicCache can be "
                    "compacted, such as Llama's, Qwen3's or GPT-2's"
                )

    @property
    def entries(self) -> int:
        """Entries held by each KV head of each layer now."""
        return cast(EvictedLayer, self.layers[0]).get_mask_sizes(0)[0]

    @property
    def nbytes(self) -> int:
        """Bytes that the cache keeps alive, by the storages behind its tensors."""
        return cache_bytes(self)


def cache_bytes(cache: Cache) -> int:
    """Bytes that a cache keeps alive: each storage behind its keys and values counted once, whole."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if tensor is not None
    }
    return sum(storages.values())


def _compact(layer: DynamicLayer, keep: Tensor, index: int) -> EvictedLayer:
    keys, values = layer.keys, layer.values
    assert keys is not None
    assert values is not None
    if keep.shape != keys.shape[:3] or keep.dtype != torch.bool:
        raise ValueError(
            f"layer {index}: keep {tuple(keep.shape)} of {keep.dtype} does not fit keys [batch, KV heads, keys] "
            f"{tuple(keys.shape[:3])}; a boolean mask of that shape is needed"
        )
    counts = keep.sum(-1)
    kept = int(counts.flatten()[0])
    if bool((counts != kept).any()) or kept == 0:
        raise ValueError(f"layer {index}: heads keep {counts.tolist()} entries; this cache needs one number, above 0, for all")
    # nonzero walks each row in order, so kept entries stay ascending
    where = keep.nonzero(as_tuple=True)[2].view(*keep.shape[:2], kept, 1)
    return EvictedLayer(
        keys.gather(2, where.expand(-1, -1, -1, keys.shape[-1])),
        values.gather(2, where.expand(-1, -1, -1, values.shape[-1])),
        keys.shape[2] - kept,
    )
