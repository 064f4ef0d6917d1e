"""Is it the lost mass or the mismatch? The two factors of an output error."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from perturbation.inputs import exact, exact_values, finite, order_p, per_head
from perturbation.output import evicted_weights, mix, projected_difference


@dataclass(frozen=True)
class Factors:
    """L = lost_mass · mismatch of each head and query: 1 − σ, and ‖ô − m_E‖ in units of the residual stream."""

    lost_mass: Float[Tensor, "*batch heads queries"]
    mismatch: Float[Tensor, "*batch heads queries"]


def factors(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
    *,
    norm: float = 1,
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
) -> Factors:
    """‖o − ô‖ = (1 − σ) ‖ô − m_E‖, m_E = Σ_E A_i ν_i / (1 − σ) the attention-weighted mean of what was evicted.

    Proof: o = σ ô + (1 − σ) m_E by the definitions of σ, ô and m_E; subtract ô. Without a sink ô is the mean m_R of what was
    kept, and the mismatch is ‖m_R − m_E‖: evicting much does no harm where it looks like what stays.

    Where no attention was lost there is no m_E; the mismatch is then 0, as the error is.

    Raises:
        ValueError: the weights are no probabilities, shapes do not fit, the mask keeps nothing, or `norm` is below 1.
    """
    norm = order_p(norm)
    weights = exact(weights, sink_mass)
    values = exact_values(values, weights)
    weights = weights.to(values.dtype)
    left = evicted_weights(weights, keep, sink_mass)
    gone = torch.where(per_head(keep, weights, sink_mass), 0, weights)
    lost = gone.sum(-1)
    apart = mix(left - gone / lost.where(lost > 0, 1)[..., None], values) * (lost > 0)[..., None]
    written = projected_difference(apart, output_projection, values.shape[-3], "head", gate)
    return Factors(lost, finite(written.norm(p=norm, dim=-1), "the mismatch"))
