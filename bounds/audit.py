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
    what rounding explains (see `slack`).
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


def slack(dtype: torch.dtype, keys: int, value_dim: int, model_dim: int) -> float:
    """The relative rounding error that both sides together may have: the sum γ of their three sums' lengths, times ε.

    A sum of m products computed in any order has relative error at most γ_m ≈ m ε with respect to the sum of the
    products' sizes (Higham, Accuracy and Stability of Numerical Algorithms, §3.1). L sums over keys, over value_dim and
    over model_dim, and so does θ.
    """
    return 2 * (keys + value_dim + model_dim) * torch.finfo(dtype).eps


def audit(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
    *,
    norm: float = 1,
    value_norms: Float[Tensor, "*#batch heads keys"] | None = None,
) -> Audit:
    """Hold L ≤ θ (arXiv 2502.03805, Theorem 3.3) and σ > ½ against the exact perturbation of every head and query.

    Args:
        weights: attention probabilities that the model used, summing to 1 − sink_mass over the keys.
        values: the values those probabilities weigh.
        output_projection: W_O as blocks per head.
        keep: one keep-mask, or many along a leading dimension (give `weights` and `values` a dimension of 1 there).
        sink_mass: a0, where the model has learned attention sinks.
        norm: p of ‖·‖_p, on both sides.
        value_norms: `projected_norms` of the same values and p, where they are at hand; else they are computed.

    Raises:
        ValueError: shapes do not fit, or σ is 0 for some query.
    """
    if value_norms is None:
        value_norms = projected_norms(values, output_projection, norm=norm)
    truth = perturbation(weights, values, output_projection, keep, sink_mass, norm=norm)
    bound = theta(weights, value_norms, keep, sink_mass)
    mass = retained_mass(weights, keep, sink_mass)
    _, value_dim, model_dim = output_projection.shape
    allowed = 1 + slack(truth.dtype, weights.shape[-1], value_dim, model_dim)
    return Audit(truth, bound, mass, condition(mass), truth > bound * allowed)
