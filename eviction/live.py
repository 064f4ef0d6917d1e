"""Attention of a window's queries over constant keys and values, whose backward pass says what each entry's removal does."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooks.masks import masked
from hooks.records import LayerRecord


@dataclass(frozen=True)
class Held:
    """What an attention call of the window reads.

    Attributes:
        record: of the call, the window's queries the last of it.
        slots: where the record's keys stand among the tokens seen; −1: there is none.
        heads: KV heads that the cache holds, over which a removal is counted.
    """

    record: LayerRecord
    slots: Int[Tensor, "batch _ keys"]
    heads: int

    @property
    def weights(self) -> int:
        """Attention weights of one query."""
        return self.slots.shape[0] * self.record.n_heads * self.record.n_keys


@dataclass
class Sketch:
    """What removals of a pool of entries do along each draw of signs at each query: r_iᵀ F r_j is twice the product of two rows.

    Attributes:
        pool: places of the entries of each cached KV head.
        along: of each [batch, heads, pool, directions], scaled such that its square sum is its KL in nats.
        rest: the sum over the entries that are not in the pool [batch, heads, directions].
    """

    pool: Int[Tensor, "batch heads pool"]
    inside: Bool[Tensor, "batch heads pool"] | None = None
    """False where a row's pool is smaller, and holds a place that is not in it."""
    valid: Bool[Tensor, "batch _ keys"] | None = None
    """False for entries that are gone already: nothing of them is counted."""
    parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Before they are put together: the changes of the pool and their rest, for some queries."""

    def add(self, change: Float[Tensor, "batch heads queries keys"]) -> None:
        """One more direction for each query."""
        if self.valid is not None:
            change = change * self.valid[:, :, None]
        entries = change.gather(-1, self.pool[:, :, None].expand(-1, -1, change.shape[2], -1))
        if self.inside is not None:
            entries = entries * self.inside[:, :, None]
        self.parts.append((entries, change.sum(-1) - entries.sum(-1)))

    def done(self, factor: Float[Tensor, " batch"]) -> None:
        """All directions are there; each number of a row times its factor."""
        entries, rests = (torch.cat(parts, 2) for parts in zip(*self.parts, strict=True))
        self.parts.clear()
        self.along, self.rest = entries.mT * factor[:, None, None, None], rests * factor[:, None, None]


@dataclass
class Live:
    """One attention call of some of the window's queries: constants, and what the backward pass gathers.

    Attributes:
        part: of the window's queries, those that run.
        first: the slot of the window's first token.
        looking: 0 where a query is a pad [batch, 1, queries, 1]; None where none is.
        sketch: where the changes themselves are wanted.
        nats: Σ over queries and backward passes of (Σ_{h in k} A_{h,i} / (1 − A_{h,i}) · g_h·(o_h − v_i))².
    """

    held: Held
    part: slice
    first: int
    looking: Tensor | None
    nats: Float[Tensor, "batch heads keys"]
    sketch: Sketch | None = None

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """A, the derivative of the soft-cap, the output, and where each query's own entry is and whether it is there.

        softmax(softcap(scale · q Kᵀ) + mask [, sink]) V, K and V those that are held but for each query's own, which is the live one.
        """
        record, dtype = self.held.record, precise(query)
        keys, values = (states.to(dtype) for states in (record.keys, record.values))
        where, there = self._own(query)
        group = query.shape[1] // record.n_kv_heads
        logits = _by_group(query.to(dtype) * record.scale, keys.mT, group)
        live = (query.to(dtype) * key.to(dtype).repeat_interleave(group, 1)).sum(-1, keepdim=True) * record.scale
        logits.scatter_(-1, where, live.where(there, logits.gather(-1, where)))
        slope = None
        if record.softcap is not None:
            capped = torch.tanh(logits / record.softcap)
            logits, slope = record.softcap * capped, 1 - capped.square()
        mask = record.mask[:, :, self.part]
        if mask.dtype == torch.bool:
            logits.masked_fill_(~mask, torch.finfo(dtype).min)  # as `masked`, in place
        else:
            logits = masked(logits, mask)
        if record.sinks is not None:
            sinks = record.sinks.to(dtype)
            sinks = sinks[None, :, None] if sinks.dim() == 1 else sinks[:, :, self.part]
            logits = torch.cat([logits, sinks.expand(*logits.shape[:3])[..., None]], -1)
        weights = logits.softmax(-1)[..., : record.n_keys]
        output = _by_group(weights, values, group)
        difference = (value.to(dtype).repeat_interleave(group, 1) - _taken(values, where, group)) * weights.gather(-1, where)
        return weights, slope, output + difference.where(there, 0), where, there

    def _own(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Of each query's own entry [batch, heads, queries, 1]: its place among the keys, and whether there is one."""
        own = torch.arange(self.first + self.part.start, self.first + self.part.stop, device=query.device)
        at = self.held.slots[:, :, None] == own[:, None]
        repeats = query.shape[1] // at.shape[1]
        where, there = at.int().argmax(-1, keepdim=True), at.any(-1, keepdim=True)
        return where.repeat_interleave(repeats, 1), there.repeat_interleave(repeats, 1)


class LiveAttention(torch.autograd.Function):
    """`Live.attention`; its backward pass is that of attention to the live parts, and gathers what removals do along the gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, probe: Tensor, live: Live) -> Tensor:
        """The output [batch, queries, heads, value_dim]. `probe` is a number that makes the backward pass come by."""
        weights, slope, output, where, there = live.attention(query, key, value)
        ctx.live, ctx.slope = live, slope
        ctx.save_for_backward(query, key, value, weights, odds_less(weights), output, where, there)
        return output.transpose(1, 2).to(query.dtype).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradients of query, key and value."""
        found = _Backward.apply(gradients[0], ctx.live, ctx.slope, *ctx.saved_tensors)
        return *found, gradients[0].new_zeros(()), None


class _Backward(torch.autograd.Function):
    """Of one gradient of the output, or under `torch.vmap` of several, of which what is as large as the entries is held one at a time."""

    @staticmethod
    def forward(gradient: Tensor, *known: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Of one."""
        found = Removal(*known).backward(gradient[None])
        return found[0][0], found[1][0], found[2][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: it is not differentiated again."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, gradient: Tensor, *known: Any) -> tuple[Any, Any]:
        """Of several."""
        return Removal(*known).backward(gradient.movedim(in_dims[0], 0)), (0, 0, 0)


@dataclass
class Removal:
    """What removals do along gradients of a call's output; buffers are made once for all of them."""

    live: Live
    slope: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    odds: Tensor
    output: Tensor
    where: Tensor
    there: Tensor

    def __post_init__(self) -> None:
        record, dtype = self.live.held.record, self.weights.dtype
        self.group = self.query.shape[1] // record.n_kv_heads
        self.keys, values = (states.to(dtype) for states in (record.keys, record.values))
        self.values = values.mT.contiguous()
        self.large = torch.empty_like(self.weights)
        self.own_value = self.value.to(dtype).repeat_interleave(self.group, 1)
        self.own_weights = self.weights.gather(-1, self.where).where(self.there, 0)
        self.difference = self.key.to(dtype).repeat_interleave(self.group, 1) - _taken(self.keys, self.where, self.group)

    def gather(self, gradients: Tensor) -> Iterator[Tensor]:
        """Add up (Σ_h A_i / (1 − A_i) · g·(v_i − o))² of each gradient g [signs, batch, heads, queries, value_dim].

        v is live at a query's own entry. Yields A_i g·(v_i − o) [batch, heads, queries, keys] of each, the gradient of the logits, in
        one buffer.
        """
        own = (gradients * self.own_value).sum(-1, keepdim=True)
        along = (gradients * self.output).sum(-1, keepdim=True)
        found = self.large
        for g, at_own, of_output in zip(gradients, own, along, strict=True):
            torch.matmul(_folded(g, self.group), self.values, out=_folded(found, self.group))
            found.scatter_(-1, self.where, at_own.where(self.there, found.gather(-1, self.where)))
            found -= of_output
            found *= self.weights
            ones, others = (part.unflatten(1, (self.live.held.heads, -1)).unbind(2) for part in (found, self.odds))
            change = ones[0] * others[0]
            for one, other in zip(ones[1:], others[1:], strict=True):
                change.addcmul_(one, other)
            if self.live.looking is not None:
                change *= self.live.looking
            if self.live.sketch is not None:
                self.live.sketch.add(change)
            self.live.nats += change.square_().sum(2)
            yield found

    def backward(self, gradients: Float[Tensor, "signs batch queries heads value_dim"]) -> tuple[Tensor, Tensor, Tensor]:
        """What goes on to query, key and value of each gradient of the output."""
        g = gradients.transpose(2, 3).to(self.weights.dtype)
        through_keys, at_own = [], []
        for logits in self.gather(g):
            if self.slope is not None:
                logits *= self.slope
            through_keys.append(_by_group(logits, self.keys, self.group))
            at_own.append(logits.gather(-1, self.where))
        own = torch.stack(at_own).where(self.there, 0)
        scale = self.live.held.record.scale
        to_query = (torch.stack(through_keys) + own * self.difference) * scale
        to_key = _summed(own * self.query.to(g.dtype) * scale, self.group)
        to_value = _summed(self.own_weights * g, self.group)
        return to_query.to(self.query.dtype), to_key.to(self.key.dtype), to_value.to(self.value.dtype)


def through(
    gradients: Float[Tensor, "signs batch queries heads value_dim"], query: Tensor, key: Tensor, value: Tensor, live: Live
) -> None:
    """Gather what removals do along gradients of the output that are given, without going further."""
    weights, slope, output, where, there = live.attention(query, key, value)
    removal = Removal(live, slope, query, key, value, weights, odds_less(weights), output, where, there)
    for _ in removal.gather(gradients.transpose(2, 3).to(weights.dtype)):
        pass


def precise(states: Tensor) -> torch.dtype:
    """Float32 or better."""
    return torch.promote_types(torch.float32, states.dtype)


def odds_less(weights: Tensor) -> Tensor:
    """1 / (1 − A); A = 1 gets a large number."""
    return (1 - weights).clamp_(min=torch.finfo(weights.dtype).eps).reciprocal_()


def _folded(per_head: Tensor, group: int) -> Tensor:
    """[batch, heads, queries, m] as [batch, kv_heads, group · queries, m]."""
    return per_head.unflatten(1, (-1, group)).flatten(2, 3)


def _by_group(rows: Tensor, of_heads: Tensor, group: int) -> Tensor:
    """rows [batch, heads, queries, m] times what their KV head has [batch, kv_heads, m, k], without a copy for each query head."""
    product = _folded(rows, group) @ of_heads
    return product.unflatten(2, (group, -1)).flatten(1, 2)


def _taken(states: Tensor, where: Tensor, group: int) -> Tensor:
    """Of what a KV head holds, each query head's own entry [batch, heads, queries, dim]."""
    apart = _folded(where, group).expand(-1, -1, -1, states.shape[-1])
    return states.gather(2, apart).unflatten(2, (group, -1)).flatten(1, 2)


def _summed(per_head: Tensor, group: int) -> Tensor:
    return per_head.unflatten(-3, (-1, group)).sum(-3)
