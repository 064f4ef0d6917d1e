"""‖ν_{h,i}‖ = ‖v_i W_h‖, the size of what each entry would write into the residual stream."""

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 512
"""Entries projected at a time: [kv_heads · group, BLOCK, model_dim] is all that ever exists of ν."""


def projected_norms(
    values: Float[Tensor, "*batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    *,
    norm: float = 1,
    block: int = BLOCK,
) -> Float[Tensor, "*batch heads keys"]:
    """‖v_i W_h‖_p for every head and entry, in float32 or better. Source: arXiv 2502.03805, the 𝒱 = V W_O of Theorem 3.3.

    ν is made in blocks of `block` entries and never held whole. For p = 2 nothing is projected at all: with W_hᵀ = Q R
    (reduced QR, once per head) ‖v W_h‖₂ = ‖R v‖₂, d_v² per entry in place of d_v · D. RᵀR is the Gram matrix W_h W_hᵀ, but
    R keeps the digits that forming the Gram matrix would lose.

    Raises:
        ValueError: the heads are no multiple of the KV heads, the value dimensions differ, or `norm` is below 1.
    """
    heads, value_dim, _ = output_projection.shape
    kv_heads = values.shape[-3]
    if heads % kv_heads or values.shape[-1] != value_dim:
        raise ValueError(
            f"values [{kv_heads} KV heads, value_dim {values.shape[-1]}] do not fit W_O [{heads} heads, value_dim "
            f"{value_dim}]: the heads must be a multiple, value_dim equal"
        )
    if norm < 1:
        raise ValueError(f"norm must be at least 1 (‖·‖_p is no norm below), not {norm}")
    dtype = torch.promote_types(torch.float32, values.dtype)
    blocks = output_projection.to(dtype)
    if norm == 2:
        blocks = torch.linalg.qr(blocks.mT, mode="r").R.mT  # [heads, value_dim, min(value_dim, model_dim)]
    blocks = blocks.unflatten(0, (kv_heads, heads // kv_heads))
    norms = [
        (part.to(dtype)[..., :, None, :, :] @ blocks).norm(p=norm, dim=-1)  # [*batch, kv_heads, group, block]
        for part in values.split(block, dim=-2)
    ]
    return torch.cat(norms, dim=-1).flatten(-3, -2)
