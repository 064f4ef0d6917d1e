"""Exact L against θ, θ_ô and the σ > ½ condition, for every head, query and mask (or budget) in one call."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bounds.centred import shifted, theta_o_hat
from bounds.curve import bound_curve
from bounds.norms import projected_norms
from bounds.theta import condition, retained_mass, theta
from perturbation.curve import budget_curve
from perturbation.output import evicted_output, perturbation


@dataclass(frozen=True)
class Audit:
    """What one audit found, each [*batch, heads, queries].

    `perturbation` is the exact L, `theta` the bound, `retained_mass` σ, `condition` σ > ½. `theta_o_hat` and `origin` are θ_ô and the
    shift family at c = 0, where they were asked for. `allowance` is what rounding alone may add to L − θ, and `violation` says where
    L ≤ θ, or a link of L ≤ θ_ô ≤ origin ≤ θ where it was asked for, is broken by more.
    """

    perturbation: Float[Tensor, "*batch heads queries"]
    theta: Float[Tensor, "*batch heads queries"]
    retained_mass: Float[Tensor, "*batch heads queries"]
    condition: Bool[Tensor, "*batch heads queries"]
    allowance: Float[Tensor, "*batch heads queries"]
    violation: Bool[Tensor, "*batch heads queries"]
    theta_o_hat: Float[Tensor, "*batch heads queries"] | None = None
    origin: Float[Tensor, "*batch heads queries"] | None = None

    @property
    def violations(self) -> int:
        """How many queries break the bound: 0, or the theory or the code is wrong."""
        return int(self.violation.sum())

    @property
    def tightness(self) -> Float[Tensor, "*batch heads queries"]:
        """L / θ, in [0, 1] up to rounding: how much of the bound is real. 1 where θ = 0, which is exact."""
        return torch.where(self.theta > 0, self.perturbation / self.theta.where(self.theta > 0, 1), 1)


def rounding(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
    *,
    norm: float = 1,
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
) -> Float[Tensor, "*batch heads queries"]:
    """How far L − θ may lie above 0 by rounding alone, in the arithmetic of float32 or better.

    A sum of m products computed in any order is off by at most m ε times the sum of the products' sizes (Higham, Accuracy
    and Stability of Numerical Algorithms, §3.1). L and θ each sum over keys, value_dim and model_dim, and the sizes are
    Σ_i |A_i − A'_i| Σ_d |v_id| ‖W_hd‖_p: more than θ where values nearly cancel in the projection. It is a worst case, at 100,000 keys a
    few per cent of θ in float32; give float64 where that is too much. Numbers that underflow (in float32 below 1e-38 for p = 1,
    1e-19 for p = 2, times the sizes) are not judged.
    """
    terms, sizes = _rounding(weights, values, output_projection, norm, gate)
    return terms * theta(weights, sizes, keep, sink_mass) + _underflow(sizes, weights, norm)


def audit(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
    *,
    norm: float = 1,
    value_norms: Float[Tensor, "*#batch heads #queries keys"] | None = None,
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
    centred: bool = False,
) -> Audit:
    """Hold L ≤ θ (arXiv 2502.03805, Theorem 3.3) and σ > ½ against the exact perturbation of every head and query.

    Examples:
        >>> weights, values = torch.tensor([[[[0.6, 0.3, 0.1]]]]), torch.tensor([[[[1.0], [1.0], [2.0]]]])
        >>> found = audit(weights, values, torch.tensor([[[1.0]]]), torch.tensor([[[True, True, False]]]))
        >>> found.perturbation, found.theta, int(found.violation.sum())
        (tensor([[[0.1000]]]), tensor([[[0.3000]]]), 0)

    Args:
        weights: attention probabilities that the model used, summing to 1 − sink_mass over the keys.
        values: the values those probabilities weigh.
        output_projection: W_O as blocks per head.
        keep: one keep-mask, or many along a leading dimension (give `weights` and `values` a dimension of 1 there).
        sink_mass: a0, where the model has learned attention sinks.
        norm: p of ‖·‖_p, on both sides.
        value_norms: `projected_norms` of the same values, p and gate, where they are at hand; else they are computed.
        gate: what the attention output is multiplied with before W_O, where the model has such a gate (`LayerRecord.gate`).
        centred: also θ_ô and the shift family at c = 0, and hold L ≤ θ_ô ≤ origin ≤ θ; the cost grows with queries · keys.

    Raises:
        ValueError: the weights are no probabilities, shapes do not fit, or the mask keeps nothing.
    """
    if value_norms is None:
        value_norms = projected_norms(values, output_projection, norm=norm, gate=gate)
    truth = perturbation(weights, values, output_projection, keep, sink_mass, norm=norm, gate=gate)
    bound = theta(weights, value_norms, keep, sink_mass)
    mass = retained_mass(weights, keep, sink_mass)
    allowed = rounding(weights, values, output_projection, keep, sink_mass, norm=norm, gate=gate)
    violation = truth > bound + allowed
    if not centred:
        return Audit(truth, bound, mass, condition(mass), allowed, violation)
    inputs = (weights, values, output_projection, keep)
    closest = theta_o_hat(*inputs, sink_mass, norm=norm, gate=gate)
    allowed = allowed + _centring(weights, values, output_projection, keep, sink_mass, norm, gate)
    zero = torch.zeros((*weights.shape[:-1], values.shape[-1]), dtype=truth.dtype, device=truth.device)
    origin = shifted(*inputs, zero, sink_mass, norm=norm, gate=gate)
    for below, above in ((truth, closest), (closest, origin), (origin, bound)):
        violation = violation | (below > above + allowed)
    return Audit(truth, bound, mass, condition(mass), allowed, violation, closest, origin)


def audit_curve(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    order: Int[Tensor, "*#batch kv_heads keys"],
    budgets: Sequence[int],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
    *,
    norm: float = 1,
    value_norms: Float[Tensor, "*#batch heads #queries keys"] | None = None,
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
) -> Audit:
    """`audit` of a ranking at every budget, for about the price of one: each field gets a leading dimension of budgets.

    What is not named below is as in `audit`.

    Args:
        order: entries per KV head, most important first (`perturbation.ranking`); several rankings along a leading dimension.
        budgets: entries kept per KV head.

    Raises:
        ValueError: as `audit`, or a budget is out of range, or `order` is no permutation.
    """
    if value_norms is None:
        value_norms = projected_norms(values, output_projection, norm=norm, gate=gate)
    curve = budget_curve(weights, values, order, budgets, sink_mass)
    truth = curve.perturbation(output_projection, norm=norm, gate=gate)
    promised = bound_curve(weights, value_norms, order, budgets, sink_mass)
    terms, sizes = _rounding(weights, values, output_projection, norm, gate)
    allowed = terms * bound_curve(weights, sizes, order, budgets, sink_mass).theta + _underflow(sizes, weights, norm)
    mass = promised.retained_mass
    return Audit(truth, promised.theta, mass, condition(mass), allowed, truth > promised.theta + allowed)


def _underflow(sizes: Tensor, weights: Tensor, norm: float) -> Tensor:
    """What numbers lose absolutely whose p-th power, which a norm takes, is below the smallest normal one."""
    power = 1 if norm == torch.inf else 1 / norm
    return weights.shape[-1] * torch.finfo(sizes.dtype).tiny ** power * (1 + sizes.amax(-1))


def _centring(
    weights: Tensor,
    values: Tensor,
    output_projection: Tensor,
    keep: Tensor,
    sink_mass: Tensor | None,
    norm: float,
    gate: Tensor | None,
) -> Tensor:
    """What rounding adds where distances from ô are formed around the mean of a head's ô: (1 − σ) times that mean's size."""
    left = evicted_output(weights, values, keep, sink_mass)
    terms, _ = _rounding(weights, values, output_projection, norm, None)
    centre = left.abs().mean(-2, keepdim=True).expand_as(left)
    rows = output_projection.to(left.dtype).norm(p=norm, dim=-1)[:, None]  # ‖W_hd‖
    size = (centre * rows if gate is None else centre * rows * gate.abs()).sum(-1)
    kept = keep.repeat_interleave(weights.shape[-3] // keep.shape[-2], -2)[..., None, :]
    return 2 * terms * size * (weights.to(left.dtype) * ~kept).sum(-1)


def _rounding(
    weights: Tensor, values: Tensor, output_projection: Tensor, norm: float, gate: Tensor | None
) -> tuple[float, Tensor]:
    """m ε, and the sizes Σ_d |v_id| ‖W_hd‖ [*batch, heads, 1 or queries, keys]."""
    if 8 < norm < torch.inf:
        raise ValueError(f"an audit in the norm p = {norm} could notice nothing: p-th powers underflow; take p up to 8, or inf")
    dtype = torch.promote_types(torch.float32, values.dtype)  # the least precise of what both sides are computed in
    _, value_dim, model_dim = output_projection.shape
    rows = output_projection.to(dtype).norm(p=norm, dim=-1).unflatten(0, (values.shape[-3], -1))  # ‖W_hd‖ [kv_heads, group, d]
    if gate is None:
        sizes = (values.to(dtype).abs() @ rows.mT).mT.flatten(-3, -2)[..., None, :]
    else:
        factors = gate.to(dtype).abs().unflatten(-3, (values.shape[-3], -1)) * rows[..., None, :]
        sizes = (factors @ values.to(dtype).abs()[..., :, None, :, :].mT).flatten(-4, -3)
    return 2 * (weights.shape[-1] + value_dim + model_dim) * torch.finfo(dtype).eps, sizes
