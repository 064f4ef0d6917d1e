"""The exact truth about a removal. Plain tensors in, plain tensors out; importing this loads torch, never transformers.

`perturbation.drift` runs a model and is imported by name.
"""

from perturbation.curve import Curve, budget_curve, ranking
from perturbation.divergence import agreement, kl_divergence
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
    "Curve",
    "Factors",
    "agreement",
    "attention_output",
    "attention_weights",
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
]
