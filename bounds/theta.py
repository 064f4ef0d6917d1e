"""The paper's bound θ, its constant C, the retained mass σ and the condition σ > ½ (arXiv 2502.03805, Theorem 3.3).

Shapes: weights A [*batch, heads, queries, keys] summing to 1 − a0, value_norms ‖ν‖
[*batch, heads, 1, keys] (as many as queries in place of 1 where a gate makes them depend on the query), keep
[*batch, kv_heads, keys]. Leading dimensions broadcast. None of this shares code with `perturbation`, which it is held against.

A query to which nothing is left (σ = 0) reads nothing, ô = 0: every bound is then that of ‖o‖, and finite.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bounds.inputs import chosen, common, evicted, finite, probabilities, sizes


def retained_mass(
    weights: Float[Tensor, "*#batch heads queries keys"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Float[Tensor, "*batch heads queries"]:
    """σ = a0 + Σ_R A_i, in [0, 1] up to rounding: the attention that survives the removal.

    Raises:
        ValueError: the weights are no probabilities, or the mask does not fit or keeps nothing.
    """
    weights = probabilities(weights, sink_mass)
    return _mass(weights, evicted(keep, weights, sink_mass), sink_mass)


def condition(retained: Float[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
    """σ > ½, where the coefficient 2 − 1/σ is positive: there, and only there, keeping more A‖ν‖ at the same σ lowers θ.

    θ bounds L whether it holds or not. Source: arXiv 2502.03805, Assumption 3.4.
    """
    return retained > 0.5


def constant(
    weights: Float[Tensor, "*#batch heads queries keys"], value_norms: Float[Tensor, "*#batch heads #queries keys"]
) -> Float[Tensor, "*batch heads queries"]:
    """C = Σ_i A_i ‖ν_i‖, the part of θ that no decision changes."""
    dtype = common(weights, value_norms)
    return finite((weights.to(dtype) * sizes(value_norms, weights).to(dtype)).sum(-1), "C")


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

    In the units of the norms. C where σ is 0. Source: arXiv 2502.03805, Theorem 3.3.

    Examples:
        >>> weights = torch.tensor([[[[0.6, 0.3, 0.1]]]])  # one head, one query
        >>> theta(weights, torch.tensor([[[[1.0, 1.0, 1.0]]]]), torch.tensor([[[True, True, False]]]))
        tensor([[[0.2000]]])

    Raises:
        ValueError: the weights are no probabilities, the norms no norms, or the mask does not fit or keeps nothing.
    """
    weights, sized, gone = _terms(weights, value_norms, keep, sink_mass)
    mass = _mass(weights, gone, sink_mass)
    lost_mass = (weights * gone).sum(-1)
    # A / σ first: at most 1 however small σ is, and right to the last digit where A ‖ν‖ would be subnormal
    survivors = weights * ~gone / mass.where(mass > 0, 1)[..., None]
    return (sized * gone).sum(-1) + lost_mass * (survivors * value_norms.to(weights.dtype)).sum(-1)


def theta_hat(
    weights: Float[Tensor, "*#batch heads queries keys"],
    value_norms: Float[Tensor, "*#batch heads #queries keys"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    stage1: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Float[Tensor, "*batch heads queries"]:
    """θ̂ = C − (2 − 1/σ₁) Σ_R A_i ‖ν_i‖ ≥ θ, with the mass σ₁ = a0 + Σ_{stage 1} A_i that is certain before stage 2 chooses.

    Proof: θ̂ − θ = (1/σ₁ − 1/σ) Σ_R A_i ‖ν_i‖ ≥ 0, since stage 1 is part of R and so σ₁ ≤ σ. At fixed σ₁ only the sum is left to
    choose: for σ₁ > ½ the top k of A_i ‖ν_i‖ over what stage 1 left minimise θ̂ exactly; for σ₁ < ½ the sign turns and the
    same choice maximises it.

    Computed as Σ_E A ‖ν‖ + (1/σ₁ − 1) Σ_R A ‖ν‖. Where σ₁ is 0, or so small that this overflows, θ̂ has no value; what is returned is
    Σ_E A ‖ν‖ + max_R ‖ν‖, the least that is known to bound θ whatever σ turns out to be.
    Source: arXiv 2502.03805, Theorem 3.5.

    Raises:
        ValueError: stage 1 holds an entry that is not kept, or the inputs are refused as by `theta`.
    """
    late = ~chosen(stage1, weights)
    if bool((stage1 & ~keep).any()):
        raise ValueError(f"stage 1 is part of what is kept, but {int((stage1 & ~keep).sum())} of its entries are not in keep")
    weights, sized, gone = _terms(weights, value_norms, keep, sink_mass)
    mass = _mass(weights, late, sink_mass)
    lost, missing = (sized * gone).sum(-1), (weights * late).sum(-1)
    survivors = weights * ~gone / mass.where(mass > 0, 1)[..., None]
    bound = lost + missing * (survivors * value_norms.to(sized.dtype)).sum(-1)
    largest = (value_norms.to(sized.dtype) * ~gone).amax(-1)
    return torch.where((mass > 0) & bound.isfinite(), bound, lost + largest)


def relaxed(
    weights: Float[Tensor, "*#batch heads queries keys"],
    value_norms: Float[Tensor, "*#batch heads #queries keys"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Float[Tensor, "*batch heads queries"]:
    """2 M (1 − σ) ≥ θ, with M the largest ‖ν_i‖ among the entries that the query looks at.

    Proof: put M for every ‖ν_i‖ in the termwise θ: Σ_E A_i M + (1/σ − 1) σ M. M does not depend on the choice, so keeping the
    top b of A minimises it: what attention-only selection optimises (arXiv 2502.03805, section 3.3). Entries of weight 0 have no
    part in θ, and so none in M: what stands in a pad does not matter.
    """
    weights, sized, gone = _terms(weights, value_norms, keep, sink_mass)
    largest = (value_norms.to(sized.dtype) * (weights > 0)).amax(-1)
    return 2 * largest * (weights * gone).sum(-1)


def _terms(weights: Tensor, value_norms: Tensor, keep: Tensor, sink_mass: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A, A‖ν‖ and ¬N, checked."""
    weights = probabilities(weights, sink_mass)
    norms = sizes(value_norms, weights)
    return weights.to(norms.dtype), weights * norms, evicted(keep, weights, sink_mass)


def _mass(weights: Tensor, gone: Tensor, sink_mass: Tensor | None) -> Tensor:
    mass = (weights * ~gone).sum(-1)
    return mass if sink_mass is None else mass + sink_mass.to(mass.dtype)
