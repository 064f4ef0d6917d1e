"""How what the window's tokens say depends on each attention output: they run again, with gradients, on constant keys and values."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from hooks.dispatch import AttentionCall, AttentionResult, Proceed, intercept
from hooks.forward import forward
from hooks.masks import masked
from hooks.records import LayerRecord

WEIGHTS = 1 << 23
"""Attention weights, over all layers, that exist at a time: so many queries are run together."""

Call = tuple[int, int]
"""An attention module's id, and which of its calls in a pass it is."""


@dataclass(frozen=True)
class Held:
    """What an attention call of the window reads: its record, and the slots of the record's keys [batch, KV heads or 1, keys] (−1: none)."""

    record: LayerRecord
    slots: Int[Tensor, "batch _ keys"]


class _Nothing(DynamicLayer):
    """Keeps nothing: what is written goes to attention, which looks elsewhere for the rest."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new states alone."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens before those that run."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of a full cache."""
        return self.seen + query_length, 0


def sign_gradients(
    model: nn.Module,
    tokens: Int[Tensor, "batch window"],
    held: Mapping[Call, Held],
    *,
    seen: int,
    signs: int,
    seed: int = 0,
    attention_mask: Tensor | None = None,
) -> dict[Call, Float[Tensor, "signs batch window heads value_dim"]]:
    """∂(Σ_y √p_{t,y} ε_{s,y} log p_{t,y}) / ∂e_{l,t} of every attention call, p held constant, ε random signs over the whole vocabulary.

    E_ε[g gᵀ] is the Fisher information of the next-token distribution about e, an addition to the attention output of query t, so that
    ½ E[(g·δ)²] is the KL (nats) of a small change δ to second order (`design.md`, estimates). `tokens` are the last of the `seen` ones; each
    query's own key and value are live, all others are the constants that `held` has. Queries do not see each other's change, so they
    run some at a time; memory does not grow with the window.

    Guarantees: parameters' `requires_grad` and `grad` are not touched; works under `torch.no_grad()` and, at the price of a copy of keys
    and values, under `torch.inference_mode()`.

    Raises:
        KeyError: an attention call has nothing in `held`.
    """
    batch, window = tokens.shape
    largest = max((each.record.n_heads * each.record.n_keys for each in held.values()), default=1)
    some = max(min(window, WEIGHTS // max(batch * largest * len(held), 1)), 1)
    found: dict[Call, list[Tensor]] = {call: [] for call in held}
    with torch.inference_mode(False), torch.enable_grad():
        for start in range(0, window, some):
            part = slice(start, min(start + some, window))
            run = _Run(held, part, seen - window)
            with intercept(model, run.attend):
                logits = _logits(model, tokens[:, part].clone(), run, attention_mask)
            outputs = list(run.added.values())
            gradients = torch.autograd.grad(
                logits, outputs, grad_outputs=_directions(logits.detach(), signs, seed, start), is_grads_batched=True
            )
            for call, gradient in zip(run.added, gradients, strict=True):
                found[call].append(gradient)
    return {call: torch.cat(parts, 2) for call, parts in found.items()}


def _logits(model: nn.Module, tokens: Tensor, run: "_Run", attention_mask: Tensor | None) -> Tensor:
    before = run.first + run.part.start
    mask = None if attention_mask is None else attention_mask[:, : before + tokens.shape[1]].clone()
    layers = getattr(model.config, "num_hidden_layers", 0)
    cache = Cache(layers=[_Nothing(before) for _ in range(layers)])
    return forward(model, tokens, cache, attention_mask=mask)


def _directions(logits: Tensor, signs: int, seed: int, start: int) -> Tensor:
    """∂(Σ_y √p_y ε_y log p_y) / ∂z = √p ⊙ ε − p Σ_y √p_y ε_y for each draw of signs [signs, batch, queries, vocabulary]."""
    p = logits.to(torch.promote_types(torch.float32, logits.dtype)).softmax(-1)
    drawn = []
    for query in range(logits.shape[1]):
        generator = torch.Generator().manual_seed(
            seed * 1_000_003 + start + query
        )  # the same for a query however many run together
        drawn.append(torch.randint(0, 2, (signs, logits.shape[-1]), generator=generator, dtype=torch.int8))
    epsilon = (2 * torch.stack(drawn, 1)[:, None].to(logits.device) - 1).to(p.dtype)
    along = p.sqrt() * epsilon
    return (along - p * along.sum(-1, keepdim=True)).to(logits.dtype)


@dataclass
class _Run:
    """One pass of some of the window's queries."""

    held: Mapping[Call, Held]
    part: slice
    first: int
    """The slot of the window's first token."""
    added: dict[Call, Tensor] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)

    def attend(self, call: AttentionCall, proceed: Proceed) -> AttentionResult:
        """Attention of the queries over what is held, each one's own key and value live."""
        here = (id(call.module), self.calls[id(call.module)])
        self.calls[id(call.module)] += 1
        held = self.held[here]
        output = live_attention(call.query, call.key, call.value, held, self.part, self.first)
        added = torch.zeros_like(output, requires_grad=True)
        self.added[here] = added
        return output + added, None


def live_attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads queries head_dim"],
    value: Float[Tensor, "batch kv_heads queries value_dim"],
    held: Held,
    part: slice,
    first: int,
) -> Float[Tensor, "batch queries heads value_dim"]:
    """softmax(softcap(scale · q Kᵀ) + mask [, sink]) V, K and V those that are held but for each query's own, which is the live one."""
    record, group = held.record, query.shape[1] // held.record.n_kv_heads
    dtype = torch.promote_types(torch.float32, query.dtype)
    keys, values = (_constant(states) for states in (record.keys, record.values))
    own = torch.arange(first + part.start, first + part.stop, device=query.device)
    at = held.slots[:, :, None] == own[:, None]  # [batch, 1 or KV heads, queries, keys]
    there = at.any(-1, keepdim=True).repeat_interleave(query.shape[1] // at.shape[1], 1)
    where = at.int().argmax(-1, keepdim=True).repeat_interleave(query.shape[1] // at.shape[1], 1)
    grouped = query.unflatten(1, (-1, group)).flatten(2, 3)
    logits = (grouped @ keys.mT).unflatten(2, (group, -1)).flatten(1, 2).to(dtype)
    live = (query * key.repeat_interleave(group, 1)).sum(-1, keepdim=True).to(dtype)
    logits = logits.scatter(-1, where, live.where(there, logits.gather(-1, where))) * record.scale
    if record.softcap is not None:
        logits = record.softcap * torch.tanh(logits / record.softcap)
    logits = masked(logits, _constant(record.mask)[:, :, part])
    if record.sinks is not None:
        sinks = _constant(record.sinks).to(dtype)
        sinks = sinks[None, :, None] if sinks.dim() == 1 else sinks[:, :, part]
        logits = torch.cat([logits, sinks.expand(*logits.shape[:3])[..., None]], -1)
    weights = logits.softmax(-1)[..., : record.n_keys].to(query.dtype)
    mixed = weights.unflatten(1, (-1, group)).flatten(2, 3) @ values
    output = mixed.unflatten(2, (group, -1)).flatten(1, 2)
    expanded = values.repeat_interleave(group, 1)
    kept = expanded.gather(2, where.expand(-1, -1, -1, values.shape[-1]))
    difference = (value.repeat_interleave(group, 1) - kept) * weights.gather(-1, where)
    return (output + difference.where(there, 0)).transpose(1, 2)


def _constant(states: Tensor) -> Tensor:
    return states.clone() if states.is_inference() else states.detach()
