"""The kept part of a ragged layer in one kernel on a GPU: varlen flash attention where torch has it, else flex attention.

Each row and KV head is a sequence of its own, with its group's queries. What comes out is a partial attention, which `merged` joins with
that over the tail and over a sink: partial softmaxes are put together by their log-sum-exps, and no entry is copied.
"""

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, no_type_check

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hooks.masks import masked

if TYPE_CHECKING:
    from eviction.cache.ragged import RaggedLayer

try:
    from torch.nn.attention import varlen as _varlen
except ImportError:
    _varlen = None  # type: ignore[assignment]
if _varlen is not None and not {"scale", "enable_gqa", "return_aux"} <= set(inspect.signature(_varlen.varlen_attn).parameters):
    _varlen = None  # type: ignore[assignment]

_aux: Any = getattr(flex_module, "AuxRequest", None)  # in place of return_lse, with releases

Partial = tuple[Tensor, Tensor]
"""Attention over a part of the entries [batch, heads, queries, value_dim], and the log of the sum of its exponentials, in float32."""

BLOCK = 1 << 26
"""Logits of the tail that exist at a time."""


def kept_part(
    query: Float[Tensor, "batch heads queries head_dim"],
    layer: "RaggedLayer",
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Partial:
    """Attention over the kept entries; `mask` [batch, heads, queries, seen] tells which slots may be seen (None: all of the kept)."""
    if flashes(query, layer, mask, softcap):
        return varlen(query, layer, scale)
    return flex(query, layer, mask, scale, softcap)


def flashes(query: Tensor, layer: "RaggedLayer", mask: Tensor | None, softcap: float | None) -> bool:
    """Whether `kept_part` goes through flash attention, which knows no mask among the kept and no soft-cap."""
    return mask is None and softcap is None and flash_takes(query, layer)


def flash_takes(query: Tensor, layer: "RaggedLayer") -> bool:
    """Whether varlen flash attention can read the layer: torch has it with what is needed, half precision, on an NVIDIA GPU of compute
    capability 8.0 or more, all heads of one width of at most 256.
    """
    if not query.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    sizes = {query.shape[-1], layer.kept_values.shape[-1]}
    half = query.dtype in (torch.float16, torch.bfloat16)
    return _varlen is not None and half and len(sizes) == 1 and max(sizes) <= 256 and max(sizes) % 8 == 0


def varlen(query: Float[Tensor, "batch heads queries head_dim"], layer: "RaggedLayer", scale: float) -> Partial:
    """By varlen flash attention: all kept entries of a head are seen by all of its queries."""
    batch, heads, queries, size = query.shape
    kv_heads = len(layer.counts[0])
    group = heads // kv_heads
    packed = query.reshape(batch * kv_heads, group, queries, size).transpose(1, 2).reshape(-1, group, size)
    starts = torch.arange(0, batch * kv_heads * queries + 1, queries, device=query.device, dtype=torch.int32)
    output, lse = _varlen.varlen_attn(
        packed.contiguous(),
        layer.kept_keys[:, None],
        layer.kept_values[:, None],
        starts,
        layer.offsets,
        queries,
        max(max(row) for row in layer.counts),
        return_aux=_varlen.AuxRequest(lse=True),
        scale=scale,
        enable_gqa=True,
    )
    if not _entries_first(query.device, query.dtype):
        lse = lse.T
    empty = (layer.offsets.diff() == 0).repeat_interleave(queries)
    # of a head that keeps nothing, the kernel says what it likes
    lse, output = lse.masked_fill(empty[:, None], -torch.inf), output.masked_fill(empty[:, None, None], 0)
    shape = (batch * kv_heads, queries, group)
    return _apart(output.reshape(*shape, -1), batch, heads), _apart(lse.reshape(*shape, 1), batch, heads)[..., 0].float()


def _apart(part: Tensor, batch: int, heads: int) -> Tensor:
    """[batch · kv_heads, queries, group, ·] -> [batch, heads, queries, ·]."""
    return part.transpose(1, 2).reshape(batch, heads, part.shape[1], part.shape[3])


@cache
def _entries_first(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the log-sum-exp comes as [queries, heads], as it is documented, or as [heads, queries], as some releases have it."""
    part = torch.zeros(3, 2, 16, device=device, dtype=dtype)
    ends = torch.tensor([0, 3], device=device, dtype=torch.int32)
    _, lse = _varlen.varlen_attn(part, part, part, ends, ends, 3, 3, return_aux=_varlen.AuxRequest(lse=True))
    return tuple(lse.shape) == (3, 2)


def flex(
    query: Float[Tensor, "batch heads queries head_dim"],
    layer: "RaggedLayer",
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Partial:
    """By flex attention: one sequence of all entries, of which a query sees those of its own row and head that the mask lets it see."""
    batch, heads, queries, size = query.shape
    kv_heads = len(layer.counts[0])
    group, entries, device = heads // kv_heads, layer.slots.shape[0], query.device
    packed = query.reshape(batch, kv_heads, group, queries, size).permute(2, 0, 1, 3, 4).reshape(1, group, -1, size)
    row = torch.arange(batch, device=device).repeat_interleave(kv_heads * queries)
    head = torch.arange(kv_heads, device=device).repeat_interleave(queries).repeat(batch)
    asked = torch.arange(queries, device=device).repeat(batch * kv_heads)
    own = row * kv_heads + head
    lengths = layer.offsets.diff().long()
    of = torch.arange(batch * kv_heads, device=device).repeat_interleave(lengths)
    slots = layer.slots.long()
    additive = mask is not None and mask.dtype != torch.bool
    rows, columns = (0, 0) if mask is None else mask.shape[:2]

    @no_type_check  # flex attention counts their parameters
    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = own[q] == of[k]
        if mask is None or additive:
            return same
        return same & mask[row[q] % rows, (head[q] * group + h) % columns, asked[q], slots[k]]

    @no_type_check
    def score(logit: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            logit = softcap * torch.tanh(logit / softcap)
        if additive:
            logit = logit + mask[row[q] % rows, (head[q] * group + h) % columns, asked[q], slots[k]]
        return logit

    per_head = None if mask is None or additive or columns == 1 else group
    block = create_block_mask(sees, None, per_head, packed.shape[2], entries, device=device)
    function: Any = _compiled() if query.is_cuda else flex_attention
    output, lse = function(
        packed,
        layer.kept_keys[None, None].expand(-1, group, -1, -1),
        layer.kept_values[None, None].expand(-1, group, -1, -1),
        score_mod=score if additive or softcap is not None else None,
        block_mask=block,
        scale=scale,
        **({"return_lse": True} if _aux is None else {"return_aux": _aux(lse=True)}),
    )
    lse = lse if isinstance(lse, Tensor) else lse.lse

    def apart(part: Tensor) -> Tensor:
        return part.reshape(group, batch, kv_heads, queries, -1).permute(1, 2, 0, 3, 4).reshape(batch, heads, queries, -1)

    return apart(output), apart(lse)[..., 0].float()


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def tail_part(
    query: Float[Tensor, "batch heads queries head_dim"],
    keys: Float[Tensor, "batch kv_heads written head_dim"],
    values: Float[Tensor, "batch kv_heads written value_dim"],
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Partial:
    """Attention over what was written since the eviction, in blocks of queries; `mask` [batch, heads, queries, written], or None."""
    batch, heads, queries, _ = query.shape
    kv_heads = keys.shape[1]
    block = max(BLOCK // max(batch * heads * keys.shape[2], 1), 1)
    outputs, sums = [], []
    for start in range(0, queries, block):
        part = query[:, :, start : start + block]
        grouped = part.unflatten(1, (kv_heads, -1)).flatten(2, 3)
        logits = (grouped @ keys.mT).float().unflatten(2, (heads // kv_heads, -1)).flatten(1, 2) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if mask is not None:
            logits = masked(logits, mask[:, :, start : start + block])
        sums.append(logits.logsumexp(-1))
        weights = (logits - sums[-1][..., None]).exp().to(values.dtype)
        grouped = weights.unflatten(1, (kv_heads, -1)).flatten(2, 3) @ values
        outputs.append(grouped.unflatten(2, (heads // kv_heads, -1)).flatten(1, 2))
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def merged(
    parts: list[Partial], sinks: Float[Tensor, "batch heads queries"] | None = None
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Attention over all parts: Σ_p o_p exp(lse_p − lse), lse the log-sum-exp over the parts and the sink's logit; in float32."""
    sums = torch.stack([lse for _, lse in parts] + ([] if sinks is None else [sinks.float()]))
    shares = (sums - sums.logsumexp(0)).exp()
    return sum(
        (output.float() * share[..., None] for (output, _), share in zip(parts, shares, strict=False)), torch.zeros(()).to(sums)
    )


def all_seen(mask: Bool[Tensor, "batch heads queries seen"], layer: "RaggedLayer") -> bool:
    """Whether every query of each row and head sees all that is kept of it."""
    rows = torch.arange(len(layer.counts), device=mask.device).repeat_interleave(
        torch.tensor([sum(row) for row in layer.counts], device=mask.device)
    )
    everything = mask.all(2).all(1)  # [1 or batch, seen]
    return bool(everything[rows % everything.shape[0], layer.slots.long()].all())
