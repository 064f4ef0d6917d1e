"""The paper's bound θ, its constant C, the retained mass σ and the condition σ > ½ (arXiv 2502.03805, Theorem 3.3).

Shapes: weights A [*batch, heads, queries, keys] summing to 1 − a0, value_norms ‖ν‖
[*batch, heads, 1, keys] (as many as queries in place of 1 where a gate makes them depend on the query), keep
[*batch, kv_heads, keys]. Leading dimensions broadcast. None of this shares code with `perturbation`, which it is held against.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def retained_mass(
    weights: Float[Tensor, "*#batch heads queries keys"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Float[Tensor, "*batch heads queries"]:
    """σ = a0 + Σ_R A_i, in [0, 1] up to rounding: the attention that survives the removal."""
    weights = weights.to(torch.promote_types(torch.float32, weights.dtype))
    # one product per KV head: its group's queries against its mask
    grouped = weights.unflatten(-3, (keep.shape[-2], -1))
    mass = (grouped @ keep.to(weights.dtype)[..., :, None, :, None]).squeeze(-1).flatten(-3, -2)
    return mass if sink_mass is None else mass + sink_mass


def condition(retained: Float[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
    """σ > ½, where the coefficient 2 − 1/σ is positive: there, and only there, keeping more A‖ν‖ lowers θ.

    θ bounds L whether it holds or not. Source: arXiv 2502.03805, Assumption 3.4.
    """
    return retained > 0.5


def constant(
    weights: Float[Tensor, "*#batch heads queries keys"], value_norms: Float[Tensor, "*#batch heads #queries keys"]
) -> Float[Tensor, "*batch heads queries"]:
    """C = Σ_i A_i ‖ν_i‖, the part of θ that no decision changes."""
    dtype = torch.promote_types(weights.dtype, value_norms.dtype)
    return (weights.to(dtype) * value_norms.to(dtype)).sum(-1)


def theta(
    weights: Float[Tensor, "*#batch heads queries keys"],
    value_norms: Float[Tensor, "*#batch heads #queries keys"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Float[Tensor, "*batch heads queries"]:
    """θ = C − (2 − 1/σ) Σ_R A_i ‖ν_i‖ ≥ L, computed termwise as Σ_E A_i ‖ν_i‖ + (1/σ − 1) Σ_R A_i ‖ν_i‖.

    Proof: o − ô = Σ_i (A_i − A'_i) ν_i with A' = A/σ on R and 0 on E, so that L ≤ Σ_i |A_i − A'_i| ‖ν_i‖, which is the
    termwise sum; the triangle inequality asks nothing of σ. The subtractive form is the same number with its digits lost.
    1/σ − 1 is taken as (Σ_E A_i) / σ for the same reason.

    In the units of the norms. Infinite where σ is 0. Source: arXiv 2502.03805, Theorem 3.3.
    """
    dtype = torch.promote_types(weights.dtype, value_norms.dtype)
    weights = weights.to(dtype)
    group = weights.shape[-3] // keep.shape[-2]
    gone = (~keep).repeat_interleave(group, dim=-2)[..., None, :]
    lost_mass = (weights * gone).sum(-1)
    sized = weights * value_norms.to(dtype)
    lost = (sized * gone).sum(-1)
    held = (sized * ~gone).sum(-1)
    mass = retained_mass(weights, keep, sink_mass)
    return torch.where(mass > 0, lost + lost_mass / mass * held, torch.inf)
