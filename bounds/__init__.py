"""What theory promises about a removal. Plain tensors in, plain tensors out; importing this loads torch, never transformers."""

from bounds.audit import Audit, audit
from bounds.norms import projected_norms
from bounds.theta import condition, constant, retained_mass, theta

__all__ = ["Audit", "audit", "condition", "constant", "projected_norms", "retained_mass", "theta"]
