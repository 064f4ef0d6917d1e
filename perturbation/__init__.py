"""The exact truth about a removal. Plain tensors in, plain tensors out; importing this loads torch, never transformers."""

from perturbation.divergence import agreement, kl_divergence
from perturbation.output import (
    attention_output,
    coupling,
    evicted_output,
    evicted_weights,
    output_difference,
    perturbation,
    projected_difference,
)
from perturbation.weights import attention_weights

__all__ = [
    "agreement",
    "attention_output",
    "attention_weights",
    "coupling",
    "evicted_output",
    "evicted_weights",
    "kl_divergence",
    "output_difference",
    "perturbation",
    "projected_difference",
]
