"""What a policy left of a prefilled cache."""

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from eviction.cache.ragged import RaggedLayer
from eviction.cache.uniform import EvictedLayer, uniform_layer
from hooks.errors import UnsupportedAttention


class EvictedCache(Cache):
    """What a policy left of a prefilled cache; goes where a cache goes (`model(…)`, `model.generate(…)`).

    Where all rows, heads and layers hold the same number of entries, stock kernels read it as it is. Else it is `ragged`: stored flat, and
    read inside `with eviction.reading(model):`.
    """

    def __init__(self, layers: Sequence[EvictedLayer | RaggedLayer]) -> None:
        super().__init__(layers=list(layers))
        self.ragged = any(isinstance(layer, RaggedLayer) for layer in layers)

    @classmethod
    def compacted(
        cls, cache: Cache, keep: Sequence[Bool[Tensor, "batch kv_heads keys"]], *, consume: bool = False
    ) -> "EvictedCache":
        """Copy the kept entries of `cache`, a prefilled cache that stays as it is, in ascending order of position.

        Kept keys keep the rotation of their true positions, and what is written next goes on at the true length. Equal to
        the full cache with the other entries masked, up to the rounding of sums of another length. With `consume` each layer of
        `cache` is freed as soon as it was copied, so that one layer at most is held twice; `cache` is empty then.

        Raises:
            ValueError: a mask does not fit its layer, or keeps nothing of a head.
            UnsupportedAttention: a layer is not a plain dynamic one (sliding windows, quantised or static caches).
        """
        if len(keep) != len(cache.layers):
            raise ValueError(f"{len(keep)} keep-masks for a cache of {len(cache.layers)} layers")
        cls.require_support(cache)
        whole = [cast(DynamicLayer, layer) for layer in cache.layers]
        for index, (layer, mask) in enumerate(zip(whole, keep, strict=True)):
            keys = layer.keys
            assert keys is not None
            if mask.shape != keys.shape[:3] or mask.dtype != torch.bool:
                raise ValueError(
                    f"layer {index}: keep {tuple(mask.shape)} of {mask.dtype} does not fit keys [batch, KV heads, keys] "
                    f"{tuple(keys.shape[:3])}; a boolean mask of that shape is needed"
                )
            if not bool(mask.any(-1).all()):
                raise ValueError(f"layer {index}: heads keep {mask.sum(-1).tolist()} entries; each must keep at least one")
        counts = {count for mask in keep for count in mask.sum(-1).flatten().tolist()}
        layers: list[EvictedLayer | RaggedLayer] = []
        for layer, mask in zip(whole, keep, strict=True):
            keys, values = layer.keys, layer.values
            assert keys is not None
            assert values is not None
            layers.append(uniform_layer(keys, values, mask) if len(counts) == 1 else RaggedLayer(keys, values, mask))
            if consume:
                layer.keys, layer.values = keys[:, :, :0].clone(), values[:, :, :0].clone()
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
    def entries(self) -> float:
        """Entries held by each KV head of each layer now; where they differ, their mean."""
        held = []
        for layer in cast(list[EvictedLayer | RaggedLayer], self.layers):
            if isinstance(layer, RaggedLayer):
                held += (layer.counts + layer.get_seq_length() - layer.seen).flatten().tolist()
            else:
                held.append(layer.get_mask_sizes(0)[0])
        mean = sum(held) / len(held)
        return int(mean) if mean == int(mean) else mean

    @property
    def nbytes(self) -> int:
        """Bytes that the cache keeps alive, by the storages behind its tensors."""
        return cache_bytes(self)


def cache_bytes(cache: Cache) -> int:
    """Bytes that a cache keeps alive: each storage behind its keys and values counted once, whole."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in (getattr(layer, name, None) for name in ("keys", "values", "kept_keys", "kept_values"))
        if tensor is not None
    }
    return sum(storages.values())
