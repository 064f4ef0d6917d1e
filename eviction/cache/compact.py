"""From a prefilled cache's layers and keep-masks to layers that hold what was kept."""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from eviction.cache.broken import BrokenLayer
from eviction.cache.hybrid import HybridLayer, entries_of
from eviction.cache.ragged import RaggedLayer
from eviction.cache.recent import WATCHED
from eviction.cache.uniform import EvictedLayer, uniform_layer
from hooks.errors import UnsupportedAttention

Kind = Literal["full", "sliding", "none"]
KINDS: dict[type, Kind] = {
    DynamicLayer: "full",
    LinearAttentionAndFullAttentionLayer: "full",
    DynamicSlidingWindowLayer: "sliding",
    LinearAttentionLayer: "none",
}
KINDS |= {watched: KINDS[stock] for stock, watched in WATCHED.items()}
if hasattr(cache_utils, "DummyLayer"):  # not in the lowest release that is supported
    KINDS[cache_utils.DummyLayer] = "none"
WHY = {
    "DynamicIndexedLayer": "sparse-index attention chooses entries by itself, from an index that eviction would leave pointing at others",
    "QuantizedLayer": "its entries are stored quantised, in blocks that cannot be taken apart",
    "BaseQuantizedLayer": "its entries are stored quantised, in blocks that cannot be taken apart",
    "StaticLayer": "it holds a fixed number of slots, so that evicting would free nothing",
    "LinearAttentionAndSlidingWindowAttentionLayer": "its attention is of a kind that is not known here",
}


def kind_of(index: int, layer: object) -> Kind:
    """Whether a cache layer holds entries of "full" or "sliding" attention, or "none".

    Raises:
        UnsupportedAttention: it is of a type that cannot be compacted.
        RuntimeError: it was left half done.
    """
    if isinstance(layer, BrokenLayer):
        layer.refuse()
    if (kind := KINDS.get(type(layer))) is not None:
        return kind
    if isinstance(layer, EvictedLayer | RaggedLayer | HybridLayer):
        return "sliding" if getattr(layer, "window", None) is not None else "full"
    known = [base.__name__ for base in type(layer).__mro__]
    why = next((reason for name, reason in WHY.items() if name in known), "what it holds is not known")
    raise UnsupportedAttention(
        f"layer {index} of the cache is a {type(layer).__name__}: {why}. A DynamicCache of full, sliding-window or linear attention can be "
        "compacted"
    )


def compact(
    layers: Sequence[Any],
    keep: Sequence[Bool[Tensor, "batch _ seen"] | None],
    *,
    padding: Bool[Tensor, "batch seen"] | None = None,
    latent: Collection[int] = (),
    carried: Mapping[int, Float[Tensor, "batch kv_heads held each"]] | None = None,
    consume: bool = False,
) -> list[Any]:
    """New layers in place of `layers`, with what `keep` keeps; they share nothing with the old ones, unless those are consumed.

    A mask is over everything seen; what it says of entries that are gone, by a sliding window or an eviction before, is not looked at. Layers
    whose attention sees the same mask go together: all full ones, all sliding ones. Where all of a kind is kept they stay as they are; where
    full ones keep the same number everywhere, stock kernels read them; else all of the kind are ragged. `padding` is False where a row has a
    pad. `carried` is what a policy adds up, of every entry held; layers that carry it are never left as they are. With `consume` the old
    layers are taken apart one by one, and linear states handed over as they are.

    Raises:
        ValueError: there is not one mask for each layer that has entries, or one does not fit its layer or keeps nothing of a head.
        UnsupportedAttention: a layer cannot be compacted.
    """
    if len(keep) != len(layers):
        raise ValueError(f"{len(keep)} keep-masks for a cache of {len(layers)} layers")
    kinds = [kind_of(index, layer) for index, layer in enumerate(layers)]
    rows = None if padding is None else padding.any(-1)
    held = [_held(index, *each, rows) for index, each in enumerate(zip(layers, kinds, keep, strict=True))]
    forms = {
        kind: _form([mask for mask, own in zip(held, kinds, strict=True) if own == kind], padding, bool(carried))
        for kind in set(kinds)
    }
    if forms.get("sliding") == "uniform":
        forms["sliding"] = "ragged"  # whose mask slides over true places
    made = []
    for index, (layer, kind, mask) in enumerate(zip(layers, kinds, held, strict=True)):
        made.append(_made(layer, mask, forms[kind], index in latent, (carried or {}).get(index), consume))
        if consume and mask is not None:
            _emptied(entries_of(layer))
    return made


def slots_of(layer: Any) -> Int[Tensor, "batch _ held"]:
    """The places, among all tokens seen, of the entries that a layer holds; −1 where there is a gap."""
    entries = entries_of(layer)
    if isinstance(entries, EvictedLayer | RaggedLayer):
        return entries.dense_slots()
    seen, keys = layer.get_seq_length(), layer.keys
    return torch.arange(seen - keys.shape[2], seen, device=keys.device, dtype=torch.int32).expand(keys.shape[0], 1, -1)


def _held(index: int, layer: Any, kind: Kind, mask: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """The mask over what the layer still holds, in the order in which it holds it."""
    if kind == "none":
        if mask is not None:
            raise ValueError(f"layer {index} is a {type(layer).__name__}, which holds no entries; its keep-mask is None")
        return None
    keys, seen = layer.keys, layer.get_seq_length()
    if keys is None and mask is None:
        return None  # it was not run: cross-attention without anything to attend to
    if keys is None or not seen:
        raise ValueError(f"layer {index} of the cache is empty; prefill it first")
    expected = (*keys.shape[:2], seen)
    if mask is None or tuple(mask.shape) != expected or mask.dtype != torch.bool:
        got = "None" if mask is None else f"{tuple(mask.shape)} of {mask.dtype}"
        raise ValueError(
            f"layer {index}: keep {got} does not fit keys [batch, KV heads, tokens seen] {expected}; a boolean mask of that shape is needed"
        )
    if isinstance(entries_of(layer), EvictedLayer | RaggedLayer):
        slots = slots_of(layer).long()
        mask = mask.gather(2, slots.clamp(min=0)) & (slots >= 0)
    else:
        mask = mask[..., seen - keys.shape[2] :]
    if not bool((mask.any(-1) if rows is None else mask.any(-1) | ~rows[:, None]).all()):  # a row of pads keeps nothing
        window = "" if kind == "full" else f" of the last {keys.shape[2]}, which the sliding window holds"
        raise ValueError(f"layer {index}: heads keep {mask.sum(-1).tolist()} entries{window}; each must keep at least one")
    return mask


def _form(masks: Sequence[Tensor | None], padding: Tensor | None, carried: bool) -> Literal["as it is", "uniform", "ragged"]:
    given = [mask for mask in masks if mask is not None]
    if not given or (not carried and all(bool(mask.all()) for mask in given)):
        return "as it is"
    counts = {count for mask in given for count in mask.sum(-1).flatten().tolist()}
    if len(counts) > 1:
        return "ragged"
    # stock masks hide the last places' pads, so that there must be none among them
    return "uniform" if padding is None or bool(padding[:, -counts.pop() :].all()) else "ragged"


def _made(layer: Any, mask: Tensor | None, form: str, latent: bool, carried: Tensor | None, consume: bool) -> Any:
    if mask is None or form == "as it is":
        return _own(layer) if not consume else layer if mask is None else _moved(layer)
    old, seen = entries_of(layer), layer.get_seq_length()
    keys, values = old.dense() if isinstance(old, EvictedLayer | RaggedLayer) else (layer.keys, layer.values)
    if form == "uniform":
        entries: Any = uniform_layer(keys, values, mask, slots_of(layer), seen, carried)
    else:
        window = getattr(old, "window", None) or getattr(old, "sliding_window", None)
        entries = RaggedLayer(
            keys, values, mask, slots=slots_of(layer), seen=seen, window=window, latent=latent, carried=carried
        )
        entries.record_past = getattr(old, "record_past", False)
    if isinstance(layer, LinearAttentionAndFullAttentionLayer):
        return HybridLayer(layer if consume else _own(layer), entries)
    return entries


def _emptied(layer: Any) -> None:
    for name in ("keys", "values", "kept_keys", "kept_values"):
        if (part := getattr(layer, name, None)) is not None:
            setattr(layer, name, part.new_empty(*part.shape[:-2], 0, part.shape[-1]))


def _moved(layer: Any) -> Any:
    """The layer's tensors in a layer of its own, so that the old one can be emptied."""
    new = copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, CacheLayerMixin):
            setattr(new, name, copy(value))
    return new


def _own(layer: Any) -> Any:
    """The layer as it is, in tensors of its own."""
    new = copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(new, name, value.clone())
        elif isinstance(value, dict):
            setattr(new, name, {key: part.clone() if isinstance(part, Tensor) else part for key, part in value.items()})
        elif isinstance(value, CacheLayerMixin):
            setattr(new, name, _own(value))
    return new
