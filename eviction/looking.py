"""From a pass's record and what earlier passes left to what a policy sees."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from eviction.cache.compact import slots_of
from eviction.cache.hybrid import entries_of
from eviction.cache.ragged import RaggedLayer
from eviction.cache.reading import covering
from eviction.cache.recent import Recent
from eviction.cache.uniform import EvictedLayer
from eviction.observation import Observation
from hooks.dispatch import AttentionCall
from hooks.masks import adds, seen, visible
from hooks.records import LayerRecord
from hooks.window import Window

KNOWN = ("queries", "mask", "query_valid")
QUERIES = {
    "queries": 2,
    "mask": 2,
    "query_valid": 1,
    "hidden_before": 1,
    "hidden_after": 1,
    "attention_output": 1,
    "projected_output": 1,
    "gate": 2,
}
"""Fields of a record that have a dimension of queries, and which it is."""


def observation(
    layer: Any,
    record: LayerRecord,
    reader: int,
    recent: Recent | None,
    *,
    latent: bool,
    pads: Tensor | None,
) -> Observation:
    """What the policy sees of a cache layer that the pass has written to.

    `recent` are the last queries of this pass and those before it, which take the place of the record's where they are more; what those before
    it gave beside their queries (hidden states, outputs) is not held, and is NaN.
    """
    entries, keys = entries_of(layer), record.keys
    compressed = isinstance(entries, EvictedLayer | RaggedLayer)
    seen = layer.get_seq_length()
    slots = slots_of(layer) if compressed else None
    if not compressed and seen > keys.shape[2]:  # a sliding window's cache, which has dropped the first ones
        slots = torch.arange(seen - keys.shape[2], seen, device=keys.device).expand(keys.shape[0], 1, -1)
    window = getattr(entries, "window", None)
    held = (None if window is None else window - 1) if compressed else layer.keys.shape[2]
    lengths = None
    if compressed:
        last = causal(seen - 1, 1, keys.shape[0], pads, keys.device)[:, 0] if recent is None else recent.spans[:, -1]
        lengths = (last[:, 1] - last[:, 0] + 1).clamp(max=seen if held is None else held).long()
    if recent is not None and recent.count > record.n_queries:
        record = extended(record, recent, reader, slots)
    carried = entries.dense_carried() if compressed else None
    if carried is not None:
        size = record.n_heads // carried.shape[1]
        carried = carried[..., reader * size : (reader + 1) * size].movedim(3, 2).flatten(1, 2)
    cached = layer.keys.shape[1] if latent else None
    return Observation(record, cached_heads=cached, held=held, slots=slots, lengths=lengths, pads=pads, carried=carried)


def extended(record: LayerRecord, recent: Recent, reader: int, slots: Tensor | None) -> LayerRecord:
    """The record with all of the `recent` queries: which of the entries still held each of them saw is told by their slots.

    Queries that see nothing of what is left to some head are not valid any more.
    """
    count = recent.count - record.n_queries
    first, last = (part[:, None, :, None] for part in recent.spans.unbind(-1))
    if slots is None:
        slots = torch.arange(record.n_keys, device=record.keys.device).expand(record.keys.shape[0], 1, -1)
    places = slots[:, :, None]
    mask = (places >= first) & (places <= last)
    if mask.shape[1] > 1:
        mask = mask.repeat_interleave(record.n_heads // mask.shape[1], 1)
    valid = mask.any(-1).all(1)  # pads see nothing, nor do queries of whose entries none are left in some head
    mask = mask | ~valid[:, None, :, None]  # rows that mean nothing must not be empty
    sinks = record.sinks
    if sinks is not None and sinks.dim() == 3:
        sinks = recent.sinks[reader]
    return replace(
        record,
        queries=recent.queries[reader],
        mask=mask,
        query_valid=valid,
        sinks=sinks,
        **{name: _unknown(getattr(record, name), dim, count) for name, dim in QUERIES.items() if name not in KNOWN},
    )


def _unknown(part: Any, dim: int, count: int) -> Any:
    """`part` with `count` NaN before it."""
    if part is None:
        return None
    shape = list(part.shape)
    shape[dim] = count
    return torch.cat([part.new_full(shape, torch.nan), part], dim)


def last_query(record: LayerRecord, count: int = 1) -> LayerRecord:
    """The record of its last query alone, or of its last `count`."""
    if count >= record.n_queries:
        return record
    changed: dict[str, Any] = {
        name: None if (part := getattr(record, name)) is None else part.narrow(dim, part.shape[dim] - count, count)
        for name, dim in QUERIES.items()
    }
    sinks = record.sinks
    return replace(record, **changed, sinks=sinks if sinks is None or sinks.dim() == 1 else sinks[:, :, -count:])


def recorded(layer: Any, record: LayerRecord, reader: int, pads: Tensor | None, spans: Tensor | None = None) -> Recent | None:
    """The record's queries, to be carried along; None where what they saw is not one span of slots each. `spans`, where they are known."""
    seen = layer.get_seq_length()
    if spans is None:
        if isinstance(entries_of(layer), EvictedLayer):
            spans = causal(seen - record.n_queries, record.n_queries, record.keys.shape[0], pads, record.keys.device)
        else:
            spans = spans_of(record.mask, record.query_valid, seen - record.n_keys)
    if spans is None:
        return None
    sinks = {} if record.sinks is None or record.sinks.dim() == 1 else {reader: record.sinks}
    return Recent({reader: record.queries}, spans, sinks)


def passed(layer: Any, call: AttentionCall, window: Window, pads: Tensor | None) -> Int[Tensor, "batch queries 2"] | None:
    """The spans of a call's last queries, those of the `window`."""
    entries, (batch, _, queries, _) = entries_of(layer), call.query.shape
    seen = layer.get_seq_length()
    if isinstance(entries, EvictedLayer):
        return causal(seen - window.count, window.count, batch, pads, call.query.device)
    valid = window.valid
    if valid is None:
        valid = torch.ones(batch, window.count, dtype=torch.bool, device=call.query.device)
    if isinstance(entries, RaggedLayer):
        mask = covering(call, entries)
        if mask is None:
            return causal(seen - queries, queries, batch, None, call.query.device)
        return spans_of(window.part(mask, 2), valid, 0)
    mask = visible(call, window.count) if window.index is None else window.part(visible(call), 2)
    return spans_of(mask, valid, seen - call.key.shape[2])


def causal(first: int, queries: int, batch: int, pads: Tensor | None, device: torch.device) -> Int[Tensor, "batch queries 2"]:
    """Everything up to itself, pads apart, for queries from slot `first` on."""
    last = torch.arange(first, first + queries, device=device, dtype=torch.int32).expand(batch, -1)
    start = torch.zeros_like(last) if pads is None else pads[:, None].to(torch.int32).expand_as(last)
    return torch.stack([start, last], -1)


def spans_of(
    mask: Shaped[Tensor, "#batch #heads queries keys"], valid: Shaped[Tensor, "batch queries"], first: int
) -> Int[Tensor, "batch queries 2"] | None:
    """The first and last slot that each query sees, of a mask over slots from `first` on.

    None where it is no span: heads see different things, there are holes, or the mask adds something to what is seen.
    """
    if adds(mask):
        return None
    lets = seen(mask)
    if lets.shape[1] > 1 and not bool((lets == lets[:, :1]).all()):
        return None
    lets = lets[:, 0].expand(valid.shape[0], valid.shape[1], -1)
    start, count = lets.int().argmax(-1), lets.sum(-1)
    places = torch.arange(lets.shape[-1], device=lets.device)
    inside = (places >= start[..., None]) & (places < (start + count)[..., None])
    if not bool((inside == lets)[valid].all()):
        return None
    spans = torch.stack([start + first, start + first + count - 1], -1)
    return spans.where(valid[..., None], torch.tensor([0, -1], device=spans.device)).int()
