"""A cache layer whose KV heads hold different numbers of entries, flat, so that the bytes held are the bytes kept.

Attention that reads it runs head by head, inside `with reading(model)`; anything else that touches what it hands out is told so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from eviction.cache.uniform import CompressedLayer
from hooks.dispatch import AttentionCall, AttentionResult, Proceed, intercept
from hooks.errors import UnsupportedAttention
from hooks.masks import visible

OUTSIDE = (
    "this cache holds different numbers of entries per head, and only attention inside `with eviction.reading(model):` can read it "
    "(eviction.generate does that by itself); under flex attention, flash attention or torch.compile it cannot be read"
)


class RaggedStates(torch.Tensor):
    """What a ragged layer hands to attention: the entries written since the eviction, and the layer that has the rest.

    It answers for its shape and dtype; every computation with it is refused, since it would leave the kept entries out.
    """

    layer: "RaggedLayer"

    @classmethod
    def of(cls, written: Tensor, layer: "RaggedLayer") -> "RaggedStates":
        """`written`, known to be a part of `layer`."""
        states = written.as_subclass(cls)
        states.layer = layer
        return states

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Attributes are answered; nothing else is.

        Raises:
            UnsupportedAttention: something computes with the states outside of `reading`.
        """
        if getattr(func, "__name__", "") in ("__get__", "size", "dim", "__repr__"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise UnsupportedAttention(OUTSIDE)


class RaggedLayer(CompressedLayer):
    """One layer: kept entries of each row and KV head one after the other, and a dense tail of what was written since.

    `kept_keys` [entries, head_dim] and `kept_values` hold head k of row b at `spans[b][k]`. It says that it is as long as what was seen, and
    that a mask is needed over the tail alone: kept entries stand before whatever comes, and are seen by all of it.
    """

    def __init__(
        self,
        keys: Float[Tensor, "batch kv_heads seen head_dim"],
        values: Float[Tensor, "batch kv_heads seen value_dim"],
        keep: Bool[Tensor, "batch kv_heads seen"],
    ) -> None:
        super().__init__()
        # boolean indexing walks rows, heads and entries in order: kept entries stay ascending
        self.kept_keys, self.kept_values = keys[keep], values[keep]
        counts = keep.sum(-1)
        ends = counts.flatten().cumsum(0).view_as(counts)
        self.counts = counts
        self.spans = [
            [slice(end - count, end) for end, count in zip(*pair, strict=True)]
            for pair in zip(ends.tolist(), counts.tolist(), strict=True)
        ]
        self.seen = keys.shape[2]
        self.lazy_initialization(keys[:, :, :0], values[:, :, :0])
        self.keys, self.values = (
            keys.new_empty(*keys.shape[:2], 0, keys.shape[3]),
            values.new_empty(*values.shape[:2], 0, values.shape[3]),
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append to the tail; attention gets states that know this layer."""
        assert self.keys is not None
        assert self.values is not None
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return RaggedStates.of(self.keys, self), RaggedStates.of(self.values, self)

    def get_seq_length(self) -> int:
        """Tokens seen: the prompt's and those written since."""
        assert self.keys is not None
        return self.seen + self.keys.shape[-2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask is needed for, and the position at which they begin: the tail."""
        assert self.keys is not None
        return self.keys.shape[-2] + query_length, self.seen

    def _fixed(self, *args: Any, **kwargs: Any) -> None:
        """Rows of a ragged layer cannot be repeated, picked or reordered yet.

        Raises:
            UnsupportedAttention: always.
        """
        raise UnsupportedAttention(
            "the rows of a ragged cache cannot be repeated or reordered, as beam search does; decode one sequence a row"
        )

    reorder_cache = batch_repeat_interleave = batch_select_indices = _fixed  # type: ignore[assignment]

    def attention(self, call: AttentionCall) -> AttentionResult:
        """softmax(softcap(scale · q kᵀ) + mask [, sink]) v over the kept entries and the tail, row by row and head by head.

        In float32 or better; kept entries are visible to every query, the tail as the call's mask has it.
        """
        assert self.keys is not None
        assert self.values is not None
        tail = replace(call, key=self.keys, value=self.values)
        mask = visible(tail)
        dtype = torch.promote_types(torch.float32, call.query.dtype)
        bias = (
            mask
            if mask.dtype != torch.bool
            else torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
        )
        batch, heads, queries, head_dim = call.query.shape
        kv_heads, group = self.keys.shape[1], heads // self.keys.shape[1]
        scale = call.options.get("scaling")
        scale = head_dim**-0.5 if scale is None else float(scale)
        softcap, sinks = call.options.get("softcap"), call.options.get("s_aux", call.options.get("sinks"))
        output = call.query.new_empty(batch, queries, heads, self.values.shape[-1])
        bias = bias.to(dtype).expand(batch, heads if mask.shape[1] > 1 else 1, queries, self.keys.shape[2])
        for row in range(batch):
            for head in range(kv_heads):
                span, own = self.spans[row][head], slice(head * group, (head + 1) * group)
                asked = call.query[row, own].flatten(0, 1)  # [group · queries, head_dim]
                logits = torch.cat([asked @ self.kept_keys[span].mT, asked @ self.keys[row, head].mT], -1).to(dtype) * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                logits = logits.unflatten(0, (group, queries))
                first = span.stop - span.start
                logits[..., first:] += bias[row, own if bias.shape[1] > 1 else slice(0, 1)]
                if sinks is not None:
                    logits = torch.cat([logits, sinks[own].to(dtype)[:, None, None].expand(-1, queries, 1)], -1)
                weights = logits.softmax(-1).to(call.query.dtype).flatten(0, 1)
                read = weights[:, :first] @ self.kept_values[span]
                read = read + weights[:, first : first + self.keys.shape[2]] @ self.values[row, head]
                output[row, :, own] = read.unflatten(0, (group, queries)).transpose(0, 1)
        return output, None


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """Inside the block, `model`'s attention can read ragged caches; other caches are read as ever.

    For sdpa and eager attention, on any device. Nothing is left on the model on exit.

    Raises:
        UnsupportedAttention: the model's attention is not dispatched, or is compiled.
    """

    def attend(call: AttentionCall, proceed: Proceed) -> AttentionResult:
        if not isinstance(call.key, RaggedStates):
            return proceed(call)
        if call.implementation not in ("sdpa", "eager"):
            raise UnsupportedAttention(OUTSIDE)
        return call.key.layer.attention(call)

    with intercept(model, attend):
        yield
