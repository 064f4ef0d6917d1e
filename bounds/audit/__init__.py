"""The promise against the truth. The one place in `bounds` that imports `perturbation`."""

from bounds.audit.check import Audit, audit, audit_curve, rounding
from bounds.audit.gap import Gap, gap

__all__ = ["Audit", "Gap", "audit", "audit_curve", "gap", "rounding"]
