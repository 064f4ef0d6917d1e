"""The promise against the truth: exact L against θ and the σ > ½ condition, for every head, query and mask in one call."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bounds.norms import projected_norms
from bounds.theta import condition, retained_mass, theta
from perturbation.output import perturbation


@dataclass(frozen=True)
class Audit:
    """What one audit found, each [*batch, heads, queries].

    `perturbation` is the exact L, `theta` the bound, `retained_mass` σ, `condition` σ > ½, and `violation` L > θ beyond
    what `rounding` explains.
    """

    perturbation: Float[Tensor, "*batch heads queries"]
    theta: Float[Tensor, "*batch heads queries"]
    retained_mass: Float[Tensor, "*batch heads queries"]
    condition: Bool[Tensor, "*batch heads queries"]
    violation: Bool[Tensor, "*batch heads queries"]

    @property
    def violations(self) -> int:
        """How many queries break the bound: 0, or the theory or the code is wrong."""
        return int(self.violation.sum())

    @property
    def tightness(self) -> Float[Tensor, "*batch heads queries"]:
        """θ / L ≥ 1, how far the bound lies above the truth; NaN where nothing changed."""
        return torch.where(self.perturbation > 0, self.theta / self.perturbation, torch.nan)


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
    Σ_i |A_i − A'_i| Σ_d |v_id| ‖W_hd‖_p: more than θ where values nearly cancel in the projection.
    """
    dtype = torch.promote_types(torch.float32, values.dtype)
    _, value_dim, model_dim = output_projection.shape
    rows = output_projection.to(dtype).norm(p=norm, dim=-1).unflatten(0, (values.shape[-3], -1))  # ‖W_hd‖ [kv_heads, group, d]
    if gate is None:
        sizes = (values.to(dtype).abs() @ rows.mT).mT.flatten(-3, -2)[..., None, :]  # [*batch, heads, 1, keys]
    else:
        factors = gate.to(dtype).abs().unflatten(-3, (values.shape[-3], -1)) * rows[..., None, :]
        sizes = (factors @ values.to(dtype).abs()[..., :, None, :, :].mT).flatten(-4, -3)  # [*batch, heads, queries, keys]
    terms = 2 * (weights.shape[-1] + value_dim + model_dim)
    return terms * torch.finfo(dtype).eps * theta(weights, sizes, keep, sink_mass)


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
) -> Audit:
    """Hold L ≤ θ (arXiv 2502.03805, Theorem 3.3) and σ > ½ against the exact perturbation of every head and query.

    Args:
        weights: attention probabilities that the model used, summing to 1 − sink_mass over the keys.
        values: the values those probabilities weigh.
        output_projection: W_O as blocks per head.
        keep: one keep-mask, or many along a leading dimension (give `weights` and `values` a dimension of 1 there).
        sink_mass: a0, where the model has learned attention sinks.
        norm: p of ‖·‖_p, on both sides.
        value_norms: `projected_norms` of the same values, p and gate, where they are at hand; else they are computed.
        gate: what the attention output is multiplied with before W_O, where the model has such a gate (`LayerRecord.gate`).

    Raises:
        ValueError: shapes do not fit, or σ is 0 for some query.
    """
    if value_norms is None:
        value_norms = projected_norms(values, output_projection, norm=norm, gate=gate)
    truth = perturbation(weights, values, output_projection, keep, sink_mass, norm=norm, gate=gate)
    bound = theta(weights, value_norms, keep, sink_mass)
    mass = retained_mass(weights, keep, sink_mass)
    allowed = rounding(weights, values, output_projection, keep, sink_mass, norm=norm, gate=gate)
    return Audit(truth, bound, mass, condition(mass), truth > bound + allowed)
