"""The exact truth about a removal. Plain tensors in, plain tensors out; importing this loads torch, never transformers.

`perturbation.drift` and `perturbation.removal` run a model and are imported by name.
"""

from perturbation.curve import Curve, budget_curve, ranking
from perturbation.divergence import Behaviour, agreement, behaviour, kl_divergence, total_variation
from perturbation.identity import Factors, factors
from perturbation.output import (
    attention_output,
    coupling,
    evicted_output,
    evicted_weights,
    output_difference,
    perturbation,
    projected_difference,
)
from perturbation.single import single_eviction_error
from perturbation.weights import attention_weights

__all__ = [
    "Behaviour",
    "Curve",
    "Factors",
    "agreement",
    "attention_output",
    "attention_weights",
    "behaviour",
    "budget_curve",
    "coupling",
    "evicted_output",
    "evicted_weights",
    "factors",
    "kl_divergence",
    "output_difference",
    "perturbation",
    "projected_difference",
    "ranking",
    "single_eviction_error",
    "total_variation",
]
