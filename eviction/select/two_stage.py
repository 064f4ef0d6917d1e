"""CriticalKV's two-stage selection (arXiv 2502.03805, Algorithm 1)."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from eviction.select.decision import Decision, with_protected
from eviction.select.top import top


@dataclass(frozen=True)
class TwoStage:
    """Stage 1 keeps the top α b by accumulated attention A; stage 2 fills the rest by (A + ε) ‖V W_O‖₁.

    Stage 1 is there to bring σ above ½. For one query of one head, with ε = 0, A not pooled and σ₁ > ½, stage 2 then minimises the bound θ̂
    (Theorem 3.5); over a window, a group and with ε it is the heuristic that the paper runs.

    Attributes:
        alpha: the share of stage 1, in [0, 1]; 1 is attention-only selection.
        epsilon: added to A in stage 2, so that norms count where attention is almost 0. The paper's 1e-4 is absolute.
        share_of: what α splits; the codes differ. "free" splits b − w, what is left beside the protected window; "budget"
            splits b and counts the window into stage 1, which then chooses max(⌊α b⌋ − w, 0) entries.
    """

    alpha: float = 0.5
    epsilon: float = 1e-4
    share_of: Literal["free", "budget"] = "free"

    needs_norms = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha lies in [0, 1], not at {self.alpha}")
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise ValueError(f"epsilon must be a finite number of at least 0, not {self.epsilon}")
        if self.share_of not in ("free", "budget"):
            raise ValueError(f"share_of must be 'free' or 'budget', not {self.share_of!r}")

    def first_stage(self, entries: int, protected: int) -> int:
        """How many entries stage 1 chooses beside the protected ones."""
        if self.share_of == "free":
            return math.floor(self.alpha * (entries - protected) + 1e-9)  # 0.29 · 100 is 29
        return max(math.floor(self.alpha * entries + 1e-9) - protected, 0)

    def __call__(
        self,
        scores: Float[Tensor, "batch kv_heads candidates"],
        entries: int,
        protected: int,
        norms: Float[Tensor, "batch kv_heads candidates"] | None = None,
    ) -> Decision:
        """Decide over the candidates, the entries before the `protected` last ones.

        `norms` are ‖v_i W_h‖₁ averaged over the heads of a group: as in the public code, stage 2 multiplies the group mean
        of A with the group mean of the norms.

        Raises:
            ValueError: no norms are given, or there are fewer candidates than entries to choose.
        """
        if norms is None:
            raise ValueError("two-stage selection needs the norms ‖V W_O‖ of the candidates; pass norms=")
        free = entries - protected
        first_count = self.first_stage(entries, protected)
        first = top(scores, first_count)
        # what stage 1 took leaves the ranking: it sinks below every product, all of which are at least 0
        products = ((scores + self.epsilon) * norms).masked_fill(first, -torch.inf)
        second = top(products, free - first_count)
        return Decision(with_protected(first | second, protected), with_protected(first, protected))
