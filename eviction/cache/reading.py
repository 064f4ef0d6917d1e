"""Attention over ragged cache layers, in place of the kernel that the model asks for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from eviction.cache.kernels import all_seen, flashes, kept_part, merged, tail_part
from eviction.cache.ragged import RaggedLayer
from eviction.cache.states import LatentStates, RaggedStates
from hooks.dispatch import AttentionCall, AttentionResult, Proceed, intercept
from hooks.errors import UnsupportedAttention
from hooks.masks import adds, masked, restricted, seen, visible

LOGITS = 1 << 18
"""Logits of a head that exist at a time."""

FEW = 16
"""Queries for which a block mask is made."""


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """Inside the block, `model`'s attention can read ragged caches; other caches are read as ever.

    Whatever kernel the model asks for (sdpa, eager, flex or flash), on any device; a latent layer is read by sdpa or eager attention.
    Nothing is left on the model on exit.

    Raises:
        UnsupportedAttention: the model's attention is not dispatched, or is compiled.
    """
    with intercept(model, attend):
        yield


def attend(call: AttentionCall, proceed: Proceed) -> AttentionResult:
    """An attention handler: ragged states are read here, all others by what comes next."""
    if isinstance(call.key, RaggedStates):
        return read(call, call.key.layer)
    if isinstance(call.key, LatentStates):
        return proceed(latent(call, call.key.layer))
    return proceed(call)


def read(call: AttentionCall, layer: RaggedLayer) -> AttentionResult:
    """softmax(softcap(scale · q kᵀ) + mask [, sink]) v over the kept entries and the tail: by head on a CPU, in one kernel on a GPU.

    The softmax is in float32 or better. `call.mask` covers everything seen; each head takes the columns of the slots that it holds.
    """
    mask = covering(call, layer)
    scale = call.options.get("scaling")
    scale = call.query.shape[-1] ** -0.5 if scale is None else float(scale)
    sinks = call.sinks
    if sinks is not None:  # a logit for each head, or for each head and query
        sinks = sinks[None, :, None, None] if sinks.dim() == 1 else sinks
        sinks = sinks.to(torch.promote_types(torch.float32, call.query.dtype)).expand(*call.query.shape[:3], 1)
    if takes_one(call):
        plain = mask if mask is None or adds(mask) else seen(mask)
        restricts = plain is not None and (plain.dtype != torch.bool or not all_seen(plain, layer))
        # many queries would go through flex attention's block mask, which is larger than all that is gained
        if call.query.shape[2] <= FEW or flashes(call.query, layer, plain if restricts else None, call.softcap):
            return in_one(call, layer, plain, restricts, scale, sinks), None
    return by_head(call, layer, mask, scale, sinks), None


def takes_one(call: AttentionCall) -> bool:
    """Whether one kernel may be better than one a head: on a GPU."""
    return call.query.is_cuda and call.query.dtype != torch.float64


def in_one(
    call: AttentionCall, layer: RaggedLayer, mask: Tensor | None, restricts: bool, scale: float, sinks: Tensor | None
) -> Tensor:
    """Kept entries by one kernel, the tail by another, their softmaxes put together [batch, queries, heads, value_dim]."""
    assert layer.keys is not None
    assert layer.values is not None
    parts, written = [], layer.keys.shape[2]
    if len(layer.slots):
        parts.append(kept_part(call.query, layer, mask if restricts else None, scale, call.softcap))
    if written:
        tail = None if mask is None else mask[..., mask.shape[-1] - written :]
        parts.append(tail_part(call.query, layer.keys, layer.values, tail, scale, call.softcap))
    return merged(parts, None if sinks is None else sinks[..., 0]).to(call.query.dtype).transpose(1, 2).contiguous()


def by_head(call: AttentionCall, layer: RaggedLayer, mask: Tensor | None, scale: float, sinks: Tensor | None) -> Tensor:
    """Row by row and head by head [batch, queries, heads, value_dim]."""
    keys, values = layer.keys, layer.values
    assert keys is not None
    assert values is not None
    total, softcap = layer.get_seq_length(), call.softcap
    dtype = torch.promote_types(torch.float32, call.query.dtype)
    batch, heads, queries, _ = call.query.shape
    kv_heads, group, written = keys.shape[1], heads // keys.shape[1], keys.shape[2]
    output = call.query.new_empty(batch, queries, heads, values.shape[-1])
    for row in range(batch):
        seen = None if mask is None else mask[row if mask.shape[0] > 1 else 0]
        for head in range(kv_heads):
            span, own = layer.spans[row][head], slice(head * group, (head + 1) * group)
            kept = span.stop - span.start
            columns = None if seen is None else _columns(layer.slots[span].long(), total - written, total)
            block = max(LOGITS // (group * (kept + written)), 1)
            for part in (slice(start, start + block) for start in range(0, queries, block)):
                asked = call.query[row, own, part].flatten(0, 1)  # [group · queries, head_dim]
                logits = torch.cat([asked @ layer.kept_keys[span].mT, asked @ keys[row, head].mT], -1).to(dtype) * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                logits = logits.unflatten(0, (group, -1))
                if seen is not None:
                    logits = masked(logits, (seen[own, part] if seen.shape[0] > 1 else seen[:, part])[..., columns])
                if sinks is not None:
                    logits = torch.cat([logits, sinks[row, own, part]], -1)
                weights = logits.softmax(-1).to(call.query.dtype).flatten(0, 1)
                mixed = weights[:, :kept] @ layer.kept_values[span] + weights[:, kept : kept + written] @ values[row, head]
                output[row, part, own] = mixed.unflatten(0, (group, -1)).transpose(0, 1)
    return output


def _columns(slots: Tensor, start: int, end: int) -> Tensor:
    """The places in a mask of entries at `slots` and of those from `start` to `end`."""
    return torch.cat([slots, torch.arange(start, end, device=slots.device)])


def latent(call: AttentionCall, layer: RaggedLayer) -> AttentionCall:
    """The call for a latent layer, whose states the model has expanded, with a mask for the slots that are there.

    Raises:
        UnsupportedAttention: the kernel takes no such mask.
    """
    if call.implementation not in ("sdpa", "eager"):
        raise UnsupportedAttention(
            f"a latent cache with different numbers of entries per layer is read by sdpa or eager attention, not by '{call.implementation}'"
        )
    chosen, there = _over_slots(call, layer, None)
    return restricted(replace(call, key=plain(call.key), value=plain(call.value)), chosen, there)


def densified(call: AttentionCall, layer: RaggedLayer, queries: int | None) -> AttentionCall:
    """The call as if the layer were dense, for whoever records it: keys and values side by side, and a mask for those that are there.

    The mask has the rows of the last `queries` queries, or all.
    """
    keys, values = layer.dense()
    chosen, there = _over_slots(call, layer, queries)
    options = {name: value for name, value in call.options.items() if name != "position_bias"}
    mask = chosen & there if chosen.dtype == torch.bool else masked(chosen, there)
    form = "sdpa" if call.implementation == "sdpa" else "eager"  # which take such masks, and differ in the soft-cap
    return replace(call, key=keys, value=values, mask=mask, options=options, implementation=form)


def _over_slots(call: AttentionCall, layer: RaggedLayer, queries: int | None) -> tuple[Tensor, Tensor]:
    """The mask [batch, heads, queries, longest] over the layer's entries side by side, and which of them are there."""
    heads, count = call.query.shape[1:3]
    slots = layer.dense_slots()
    slots = slots.repeat_interleave(heads // slots.shape[1], 1)[:, :, None]
    mask = covering(call, layer)
    if queries is not None and mask is not None:
        mask = mask[:, :, -queries:]
    slots = slots.expand(-1, -1, min(count, queries or count) if mask is None else mask.shape[2], -1)
    there = slots >= 0
    return (there if mask is None else mask.expand(*slots.shape[:3], -1).gather(-1, slots.clamp(min=0).long())), there


def plain(states: Tensor) -> Tensor:
    """The states as attention takes them."""
    return states.plain if isinstance(states, LatentStates) else states


def covering(call: AttentionCall, layer: RaggedLayer) -> Tensor | None:
    """The call's mask over all slots seen, [1 or batch, 1 or heads, queries, seen]; None where a lone query sees everything.

    What a stock cache's window would have dropped is hidden too: of some families the mask has no window of its own.
    """
    total, queries = layer.get_seq_length(), call.query.shape[2]
    dropped = 0 if layer.window is None else max(total - queries - layer.window + 1, 0)
    lone = queries == 1 and not call.implementation.startswith("flash")
    if call.mask is None and lone and call.options.get("position_bias") is None and not dropped:
        return None
    key = call.query.new_empty(1, 1, 1, 1).expand(1, 1, total, 1)  # for its length
    mask = visible(replace(call, key=key))
    there = torch.arange(total, device=mask.device) >= dropped
    return mask & there if mask.dtype == torch.bool else masked(mask, there)
