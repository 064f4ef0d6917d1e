"""Bounds that always beat θ: the same triangle inequality, taken around a better point than the origin.

θ measures every value from 0, so a component that all values share, and that no eviction can change, counts in full. Shapes
as in `bounds.theta`; values V [*batch, kv_heads, keys, value_dim], W_O as blocks W_h [heads, value_dim, model_dim]. Every function
takes the same inputs and raises ValueError where the weights are no probabilities, shapes do not fit, the mask keeps nothing, or
`norm` is below 1. A `gate` g_t multiplies the attention output before W_O, as in `perturbation`.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bounds.distances import projected_distances
from bounds.inputs import common, evicted, finite, probabilities


def shifted(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    reference: Float[Tensor, "*#batch heads queries value_dim"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
    *,
    norm: float = 1,
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
) -> Float[Tensor, "*batch heads queries"]:
    """The shift family: L ≤ Σ_E A_i ‖ν_i − c‖ + (1 − σ) ‖ô − c‖ for every reference point c, given in value space.

    Proof: ô − o = Σ_E A_i (ô − ν_i) = (1 − σ) (ô − c) − Σ_E A_i (ν_i − c); take norms. Nothing is assumed of σ.
    c = 0 is the bound between θ_ô and θ: Σ_E A ‖ν‖ + (1 − σ) ‖ô‖ ≤ θ, since ‖ô‖ ≤ Σ_R A ‖ν‖ / σ.
    """
    far = projected_distances(values, output_projection, reference, norm=norm, gate=gate)
    weights, gone = _checked(weights, values, keep, sink_mass, far.dtype)
    apart = _evicted_output(weights, gone, values, sink_mass) - reference.to(weights.dtype)
    if gate is not None:
        apart = apart * gate.to(apart.dtype)
    own = (apart @ output_projection.to(apart.dtype)).norm(p=norm, dim=-1)
    lost = weights * gone
    return finite((lost * far).sum(-1) + lost.sum(-1) * own, "the shift family")


def theta_o_hat(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
    *,
    norm: float = 1,
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
) -> Float[Tensor, "*batch heads queries"]:
    """θ_ô = Σ_E A_i ‖ν_i − ô‖ ≥ L, the least of the shift family, and so never above θ.

    Proof: it is the family at c = ô. For any other c, Σ_E A_i ‖ν_i − ô‖ ≤ Σ_E A_i (‖ν_i − c‖ + ‖c − ô‖), which is the
    family at c; so L ≤ θ_ô ≤ Σ_E A_i ‖ν_i‖ + (1 − σ) ‖ô‖ ≤ θ. Always: nothing is assumed of σ, p or the sink.

    Examples:
        >>> weights, values = torch.tensor([[[[0.6, 0.3, 0.1]]]]), torch.tensor([[[[1.0], [1.0], [2.0]]]])
        >>> theta_o_hat(weights, values, torch.tensor([[[1.0]]]), torch.tensor([[[True, True, False]]]))
        tensor([[[0.1000]]])
    """
    weights, gone = _checked(weights, values, keep, sink_mass, common(values, output_projection, gate))
    left = _evicted_output(weights, gone, values, sink_mass)
    return (weights * gone * projected_distances(values, output_projection, left, norm=norm, gate=gate)).sum(-1)


def theta_o(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
    *,
    norm: float = 1,
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
) -> Float[Tensor, "*batch heads queries"]:
    """θ_o = (1/σ) Σ_E A_i ‖ν_i − o‖ ≥ L. Its distances do not depend on the choice, but it may exceed θ.

    Proof: ô − o = (1/σ) Σ_E A_i (o − ν_i); take norms. As a ratio with fixed distances it has an exact minimiser at any length
    (`bounds.dinkelbach`).

    Where σ is 0, or so small that 1/σ overflows, it has no value; what is returned is the bound of the shift family at c = 0, which
    is C where σ is 0.
    """
    weights, gone = _checked(weights, values, keep, sink_mass, common(values, output_projection, gate))
    whole = _mix(weights, values)
    mass = (weights * ~gone).sum(-1)
    if sink_mass is not None:
        mass = mass + sink_mass.to(mass.dtype)
    far = (weights * gone * projected_distances(values, output_projection, whole, norm=norm, gate=gate)).sum(-1)
    bound = far / mass.where(mass > 0, 1)
    if bool((held := (mass > 0) & bound.isfinite()).all()):
        return bound
    return torch.where(
        held, bound, shifted(weights, values, output_projection, keep, 0 * whole, sink_mass, norm=norm, gate=gate)
    )


def _checked(
    weights: Tensor, values: Tensor, keep: Tensor, sink_mass: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A, in `dtype` or better, and ¬N."""
    if values.shape[-2] != weights.shape[-1]:
        raise ValueError(f"values of {values.shape[-2]} keys do not fit weights of {weights.shape[-1]}")
    exact = probabilities(weights, sink_mass)
    gone = evicted(keep, exact, sink_mass)
    return exact.to(torch.promote_types(dtype, common(exact, sink_mass))), gone


def _evicted_output(weights: Tensor, gone: Tensor, values: Tensor, sink_mass: Tensor | None) -> Tensor:
    """ô in value space, 0 where σ is 0."""
    held = weights * ~gone
    mass = held.sum(-1, keepdim=True)
    if sink_mass is not None:
        mass = mass + sink_mass[..., None].to(mass.dtype)
    return _mix(held / mass.where(mass > 0, 1), values)


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Σ_i w_i v_i per head [*batch, heads, queries, value_dim]."""
    grouped = weights.unflatten(-3, (values.shape[-3], -1))
    return (grouped @ values.to(weights.dtype)[..., :, None, :, :]).flatten(-4, -3)
