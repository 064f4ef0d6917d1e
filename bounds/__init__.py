"""What theory promises about a removal. Plain tensors in, plain tensors out; importing this loads torch, never transformers."""

from bounds.aggregate import accumulated_bound, over_heads, over_window
from bounds.audit import Audit, Gap, audit, audit_curve, gap
from bounds.centred import shifted, theta_o, theta_o_hat
from bounds.curve import BoundCurve, bound_curve
from bounds.distances import projected_distances
from bounds.logits import bennett, hoeffding
from bounds.norms import projected_norms
from bounds.optimum import (
    Optimum,
    branch_and_bound,
    dinkelbach,
    exhaustive,
    local_search,
    minimal_theta,
    minimal_theta_o_hat,
)
from bounds.theta import condition, constant, relaxed, retained_mass, theta, theta_hat

__all__ = [
    "Audit",
    "BoundCurve",
    "Gap",
    "Optimum",
    "accumulated_bound",
    "audit",
    "audit_curve",
    "bennett",
    "bound_curve",
    "branch_and_bound",
    "condition",
    "constant",
    "dinkelbach",
    "exhaustive",
    "gap",
    "hoeffding",
    "local_search",
    "minimal_theta",
    "minimal_theta_o_hat",
    "over_heads",
    "over_window",
    "projected_distances",
    "projected_norms",
    "relaxed",
    "retained_mass",
    "shifted",
    "theta",
    "theta_hat",
    "theta_o",
    "theta_o_hat",
]
