"""The exact truth about a removal: the attention output before and after, and how far apart they are.

Everything takes plain tensors, with any number of leading batch dimensions that broadcast, so that many masks are judged
in one call. Shapes: weights A [*batch, heads, queries, keys] summing to 1 − a0, values V [*batch, kv_heads, keys, value_dim],
W_O as blocks W_h [heads, value_dim, model_dim], keep N [*batch, kv_heads, keys].
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Level = Literal["head", "group", "layer"]


def attention_output(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
) -> Float[Tensor, "*batch heads queries value_dim"]:
    """Σ_i A_i v_i of every head, in value space (before W_O), in float32 or better."""
    return _mix(_exact(weights), values)


def evicted_weights(
    weights: Float[Tensor, "*#batch heads queries keys"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Float[Tensor, "*batch heads queries keys"]:
    """A' = N ⊙ A / σ, the weights after removal: softmax over what is left, the sink included.

    σ = a0 + Σ_R A_i. Source: arXiv 2502.03805, Theorem 3.2 (there without a sink).

    Raises:
        ValueError: σ is 0 for some query (nothing that it looked at is kept), so that A' is not determined by A.
    """
    weights = _exact(weights)
    kept = _per_head(keep, weights)
    return torch.where(kept, weights / _retained(weights, kept, sink_mass)[..., None], 0)


def evicted_output(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Float[Tensor, "*batch heads queries value_dim"]:
    """Σ_R A_i v_i / σ of every head, in value space: the attention output after removal."""
    return _mix(evicted_weights(weights, keep, sink_mass), values)


def output_difference(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Float[Tensor, "*batch heads queries value_dim"]:
    """o − ô of every head in value space, accurate however small it is.

    o − ô = Σ_i (A_i − A'_i) v_i, where A_i − A'_i is A_i for an evicted entry and −A_i (1 − σ) / σ for a kept one, with
    1 − σ summed over the evicted entries. No large numbers are subtracted, so the rounding error is relative to the
    difference's own terms and not to the output.

    Raises:
        ValueError: σ is 0 for some query.
    """
    weights = _exact(weights)
    kept = _per_head(keep, weights)
    lost = torch.where(kept, 0, weights).sum(-1, keepdim=True)
    share = lost / _retained(weights, kept, sink_mass)[..., None]
    return _mix(torch.where(kept, -weights * share, weights), values)


def perturbation(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
    *,
    norm: float = 1,
    level: Level = "head",
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
) -> Float[Tensor, "*batch units queries"]:
    """L = ‖Σ_h (o_h − ô_h) W_h‖_p, the exact change of the attention output. Source: arXiv 2502.03805, equation 3.

    The sum runs over one head (`level="head"`, units = heads), over the heads that share a KV head ("group", units =
    KV heads) or over all heads ("layer", units = 1): summed before the norm, so that heads may cancel. In units of the
    residual stream, before any norm or multiplier that follows W_O. A `gate` multiplies the attention output before W_O.

    Raises:
        ValueError: σ is 0 for some query, or `norm` is below 1.
    """
    if norm < 1:
        raise ValueError(f"norm must be at least 1 (‖·‖_p is no norm below), not {norm}")
    difference = output_difference(weights, values, keep, sink_mass)
    return projected_difference(difference, output_projection, values.shape[-3], level, gate).norm(p=norm, dim=-1)


def projected_difference(
    difference: Float[Tensor, "*batch heads queries value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    n_kv_heads: int,
    level: Level = "head",
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
) -> Float[Tensor, "*batch units queries model_dim"]:
    """Σ_h (g ⊙ Δ_h) W_h over each head, KV group or the whole layer: what reaches the residual stream, with its direction."""
    if gate is not None:
        difference = difference * gate.to(difference.dtype)
    projected = difference @ output_projection.to(difference.dtype)
    if level == "head":
        return projected
    units = n_kv_heads if level == "group" else 1
    return projected.unflatten(-3, (units, -1)).sum(-3)


def coupling(projected: Float[Tensor, "*batch heads queries model_dim"], *, norm: float = 1) -> Float[Tensor, "*batch queries"]:
    """‖Σ_h Δ_h‖ / Σ_h ‖Δ_h‖ in [0, 1]: 1 where the heads' errors add up, 0 where they cancel; NaN where there is no error."""
    return projected.sum(-3).norm(p=norm, dim=-1) / projected.norm(p=norm, dim=-1).sum(-2)


def _exact(weights: Tensor) -> Tensor:
    return weights.to(torch.promote_types(torch.float32, weights.dtype))


def _per_head(keep: Tensor, weights: Tensor) -> Tensor:
    """The keep-mask of each query head, [*batch, heads, 1, keys]."""
    heads, kv_heads = weights.shape[-3], keep.shape[-2]
    if heads % kv_heads or keep.shape[-1] != weights.shape[-1]:
        raise ValueError(
            f"keep [{kv_heads} KV heads, {keep.shape[-1]} keys] does not fit weights [{heads} heads, "
            f"{weights.shape[-1]} keys]: the heads must be a multiple, the keys equal"
        )
    return keep.repeat_interleave(heads // kv_heads, dim=-2)[..., None, :]


def _retained(weights: Tensor, kept: Tensor, sink_mass: Tensor | None) -> Tensor:
    mass = torch.where(kept, weights, 0).sum(-1)
    if sink_mass is not None:
        mass = mass + sink_mass
    if bool((empty := mass <= 0).any()):
        raise ValueError(
            f"the retained mass σ is 0 for {int(empty.sum())} of {empty.numel()} queries: keep at least one entry that "
            "each query looks at"
        )
    return mass


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Σ_i w_i v_i per head, the heads of a group sharing their values; [*batch, heads, queries, value_dim]."""
    kv_heads = values.shape[-3]
    grouped = weights.unflatten(-3, (kv_heads, -1)).flatten(-3, -2)  # a group's queries in one product
    mixed = grouped @ values.to(weights.dtype)
    return mixed.unflatten(-2, (-1, weights.shape[-2])).flatten(-4, -3)
