"""‖ν_{h,i} − c_{h,t} W_h‖: how far what each entry writes lies from a reference point of each query."""

import torch
from jaxtyping import Float
from torch import Tensor

from bounds.inputs import common, finite, spread, triangular

BLOCK = 512


def projected_distances(
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    reference: Float[Tensor, "*#batch heads queries value_dim"],
    *,
    norm: float = 1,
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
    block: int = BLOCK,
) -> Float[Tensor, "*batch heads queries keys"]:
    """‖(v_i − c_t) W_h‖_p for every head, query and entry, c in value space, in float32 or better.

    The difference is formed before the product: a component that all values share would otherwise leave nothing but rounding. It
    is enough to take one point per head from both sides first, (v_i − c̄) W − (c_t − c̄) W with c̄ the mean of its references,
    so ν is made once for all queries, in blocks of `block` entries. Rounding is relative to v_i, c_t and c̄.
    For p = 2 and no gate the triangular factor of W_hᵀ takes the place of W_h (see `projected_norms`).
    With a `gate` g_t it is ‖(g_t ⊙ (v_i − c_t)) W_h‖, a projection for each query.

    Raises:
        ValueError: shapes do not fit, or `norm` is below 1.
    """
    values, blocks = spread(values, output_projection, norm)
    grouping = blocks.shape[:2]
    dtype = common(values, blocks, reference, gate)
    values, blocks = values.to(dtype), blocks.to(dtype)
    if reference.shape[-3] != output_projection.shape[0] or reference.shape[-1] != values.shape[-1]:
        raise ValueError(
            f"reference {tuple(reference.shape)} must be [*batch, heads, queries, value_dim], with {output_projection.shape[0]} "
            f"heads and value_dim {values.shape[-1]}"
        )
    points = reference.to(values.dtype).unflatten(-3, grouping)
    centre = points.mean(-2, keepdim=True)  # [*batch, kv_heads, group, 1, value_dim]
    points = points - centre
    values = values[..., :, None, :, :] - centre
    if gate is not None:
        return finite(_gated(values, blocks, points, gate.to(dtype).unflatten(-3, grouping), norm, block), "‖ν − c‖")
    if norm == 2:
        blocks = triangular(blocks)
    placed = points @ blocks
    parts = [
        torch.cdist(placed, part @ blocks, p=norm, compute_mode="donot_use_mm_for_euclid_dist")
        for part in values.split(block, dim=-2)
    ]
    return finite(torch.cat(parts, dim=-1), "‖ν − c‖").flatten(-4, -3)


def _gated(values: Tensor, blocks: Tensor, points: Tensor, gate: Tensor, norm: float, block: int) -> Tensor:
    per_query = []
    for point, factor in zip(points.unbind(-2), gate.unbind(-2), strict=True):
        scaled = factor[..., None] * blocks  # diag(g_t) W_h
        parts = [((part - point[..., None, :]) @ scaled).norm(p=norm, dim=-1) for part in values.split(block, dim=-2)]
        per_query.append(torch.cat(parts, dim=-1))
    return torch.stack(per_query, dim=-2).flatten(-4, -3)
