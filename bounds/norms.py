"""‖ν_{h,i}‖ = ‖v_i W_h‖, the size of what each entry would write into the residual stream."""

import torch
from jaxtyping import Float
from torch import Tensor

from bounds.inputs import common, finite, spread, triangular

BLOCK = 512
"""Entries projected at a time: [kv_heads · group, BLOCK, model_dim] is all that ever exists of ν."""


def projected_norms(
    values: Float[Tensor, "*batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    *,
    norm: float = 1,
    gate: Float[Tensor, "*batch heads queries value_dim"] | None = None,
    block: int = BLOCK,
) -> Float[Tensor, "*batch heads queries_or_1 keys"]:
    """‖v_i W_h‖_p for every head and entry, [*batch, heads, 1, keys], in float32 or better.

    Source: arXiv 2502.03805, the 𝒱 = V W_O of Theorem 3.3.

    ν is made in blocks of `block` entries, each in the place of the one before, and never held whole; no gradient flows. For p = 2
    and no gate nothing is projected at all: with W_hᵀ = Q R ‖v W_h‖₂ = ‖R v‖₂, d_v² per entry in place of
    d_v · D. RᵀR is the Gram matrix W_h W_hᵀ, but R keeps the digits that forming the Gram matrix would lose.

    With a `gate` the norm is ‖(g_t ⊙ v_i) W_h‖, one for each query: [*batch, heads, queries, keys], at as many times the cost.

    Raises:
        ValueError: the heads are no multiple of the KV heads, the value dimensions differ, or `norm` is below 1.
    """
    values, blocks = spread(values.detach(), output_projection.detach(), norm)  # [kv_heads, group, value_dim, model_dim]
    if norm == 2 and gate is None:
        blocks = triangular(blocks)  # [heads, value_dim, min(value_dim, model_dim)]
    if gate is not None:
        dtype = common(values, gate)
        gate = gate.to(dtype).unflatten(-3, blocks.shape[:2])
        return finite(_gated(values.to(dtype), blocks.to(dtype), gate, norm, block), "‖ν‖")
    batch, (kv_heads, group, _, width) = values.shape[:-3], blocks.shape
    rows, flat = values.flatten(0, -4) if batch else values[None], blocks.flatten(0, 1)
    norms = values.new_empty(len(rows), kv_heads * group, values.shape[-2])
    held = values.new_empty(kv_heads * group * min(block, values.shape[-2]) * width)  # written anew for each block
    for row, result in zip(rows, norms, strict=True):
        for part, measured in zip(row.split(block, dim=-2), result.split(block, dim=-1), strict=True):
            entries = part[:, None].expand(-1, group, -1, -1).flatten(0, 1)
            projected = held[: entries.shape[0] * entries.shape[1] * width].view(*entries.shape[:2], width)
            torch.bmm(entries, flat, out=projected)
            if norm == 1:  # in place, while the block is in the processor's cache: faster than a norm by itself
                measured.copy_(projected.abs_().sum(-1))
            elif norm == 2:
                measured.copy_(projected.square_().sum(-1).sqrt_())
            else:
                measured.copy_(torch.linalg.vector_norm(projected, ord=norm, dim=-1))
    return finite(norms, "‖ν‖").view(*batch, kv_heads * group, 1, -1)


def _gated(values: Tensor, blocks: Tensor, gate: Tensor, norm: float, block: int) -> Tensor:
    """‖(g_t ⊙ v_i) W_h‖ a query at a time, gate [*batch, kv_heads, group, queries, value_dim]."""
    per_query = []
    for factor in gate.unbind(-2):
        scaled = factor[..., None] * blocks  # diag(g_t) W_h
        norms = [(part[..., :, None, :, :] @ scaled).norm(p=norm, dim=-1) for part in values.split(block, dim=-2)]
        per_query.append(torch.cat(norms, dim=-1))
    return torch.stack(per_query, dim=-2).flatten(-4, -3)
