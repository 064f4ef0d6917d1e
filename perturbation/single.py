"""The exact error of removing one entry alone, for every entry."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from perturbation.inputs import exact, exact_values, finite, finite_gate, order_p
from perturbation.inputs import projection as exact_projection
from perturbation.output import mix

BLOCK = 4096
"""Pairs of a query and an entry projected at a time, per head."""


def single_eviction_error(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
    *,
    norm: float = 1,
    level: Literal["head", "group", "layer"] = "group",
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
) -> Float[Tensor, "*batch units queries keys"]:
    """L of every mask that leaves out one entry: ‖Σ_h A_{h,i} / (1 − A_{h,i}) (ν_{h,i} − o_h)‖_p.

    Proof: o − ô = (1/σ) Σ_E A_i (ν_i − o) with E = {i} and σ = 1 − A_i. One KV entry serves the G heads of its group, so the
    sum runs over them before the norm ("group", units = KV heads); "head" gives each head's part alone, "layer" (one unit) the sum over
    all heads: what an entry costs that all of them share, as the latent ones of MLA.

    In value space and L2 this is the score of CAOTE (arXiv 2504.14051); here it is exact in the residual stream. Where A_i > ½, the factor
    and the difference both lose digits, so the same number is formed as A_i (ν_i − ô) with ô the mean of what else is there; where
    nothing else is there (A_i = 1, n = 1) ô = 0 and the error is ‖ν_i‖.

    The cost is that of projecting queries × keys vectors per head. For p = 2 they meet the triangular factor of W_Oᵀ instead of W_O
    where that is smaller: ‖x W‖₂ = ‖x Rᵀ‖₂ with Wᵀ = Q R, the cross blocks W_h W_h'ᵀ of a group within it.

    Examples:
        >>> weights, values = torch.tensor([[[[0.6, 0.3, 0.1]]]]), torch.tensor([[[[1.0], [1.0], [2.0]]]])
        >>> single_eviction_error(weights, values, torch.tensor([[[1.0]]]))
        tensor([[[[0.1500, 0.0429, 0.1000]]]])

    Raises:
        ValueError: the weights are no probabilities, shapes do not fit, or `norm` is below 1.
    """
    norm = order_p(norm)
    if level not in ("head", "group", "layer"):
        raise ValueError(f"level is 'head', 'group' or 'layer', not {level!r}")
    weights = exact(weights, sink_mass)
    values = exact_values(values, weights)
    dtype = torch.promote_types(values.dtype, output_projection.dtype)
    for tensor in (sink_mass, gate):
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    weights, values = weights.to(dtype), values.to(dtype)
    heads, queries, keys = weights.shape[-3:]
    kv_heads = values.shape[-3]
    grouping = (kv_heads, heads // kv_heads)
    blocks = exact_projection(output_projection, values, heads).unflatten(
        0, grouping
    )  # [kv_heads, group, value_dim, model_dim]
    if level != "head":
        blocks = blocks.flatten(1, 2) if level == "group" else blocks.flatten(0, 2)[None]
    if norm == 2:
        blocks = torch.linalg.qr(blocks.mT, mode="r").R.mT
    factor = None if gate is None else finite_gate(gate).to(values.dtype).unflatten(-3, grouping)[..., None, :]
    output = mix(weights, values).unflatten(-3, grouping)[..., None, :]  # [*batch, kv_heads, group, queries, 1, value_dim]
    share = weights.unflatten(-3, grouping)
    top, moved = _dominant(weights, values, sink_mass)
    top, moved = top.unflatten(-3, grouping), moved.unflatten(-3, grouping)
    errors = []
    step = max(1, BLOCK // queries)
    for start in range(0, keys, step):
        part = slice(start, min(start + step, keys))
        each = share[..., part, None]
        change = each / (1 - each).clamp(min=0.5) * (values[..., :, None, None, part, :] - output)
        here = top == torch.arange(part.start, part.stop, device=top.device)
        change = torch.where((here & (share[..., part] > 0.5))[..., None], moved[..., None, :], change)
        if factor is not None:
            change = change * factor
        if level == "layer":
            change = change.flatten(-5, -4).unsqueeze(-5)
        if level != "head":  # [*batch, kv_heads, queries, block, group · value_dim]
            change = change.movedim(-4, -2).flatten(-2)
            written = change @ blocks[:, None]
        else:
            written = change @ blocks[:, :, None]
        error = written.norm(p=norm, dim=-1)
        errors.append(error.flatten(-4, -3) if level == "head" else error)
    return finite(torch.cat(errors, dim=-1), "the error of an entry")


def _dominant(weights: Tensor, values: Tensor, sink_mass: Tensor | None) -> tuple[Tensor, Tensor]:
    """The entry with the most weight of each query [*batch, heads, queries, 1], and what its removal moves: A_i (v_i − ô)."""
    top = weights.argmax(-1, keepdim=True)
    rest = weights.scatter(-1, top, 0)
    mass = rest.sum(-1, keepdim=True)
    if sink_mass is not None:
        mass = mass + sink_mass[..., None]
    left = mix(rest / mass.where(mass > 0, 1), values)
    group = weights.shape[-3] // values.shape[-3]
    own = values.repeat_interleave(group, dim=-3)
    shape = (*torch.broadcast_shapes(top.shape[:-2], own.shape[:-2]), top.shape[-2], own.shape[-1])
    own = own.expand(*shape[:-2], *own.shape[-2:]).gather(-2, top.expand(*shape[:-1], 1).expand(shape))
    return top, weights.gather(-1, top) * (own - left)
