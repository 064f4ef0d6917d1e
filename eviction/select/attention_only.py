"""What every method before CriticalKV does: keep the entries with the most accumulated attention."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from eviction.select.decision import Decision, with_protected
from eviction.select.top import top


@dataclass(frozen=True)
class AttentionOnly:
    """The top b − w by accumulated attention, beside the w protected entries.

    Minimises the relaxed bound 2 M (1 − σ), M = max_i ‖ν_i‖ (arXiv 2502.03805, section 3.3).
    """

    needs_norms = False

    def __call__(
        self,
        scores: Float[Tensor, "batch kv_heads candidates"],
        entries: int,
        protected: int,
        norms: Float[Tensor, "batch kv_heads candidates"] | None = None,
    ) -> Decision:
        """Decide over the candidates, the entries before the `protected` last ones; `norms` are not looked at."""
        return Decision(with_protected(top(scores, entries - protected), protected))
