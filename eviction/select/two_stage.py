"""CriticalKV's two-stage selection (arXiv 2502.03805, Algorithm 1)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eviction.checks import at_least, one_of, share
from eviction.observation import Observation
from eviction.select.decision import Decision, Scores
from eviction.select.top import best


@dataclass(frozen=True)
class TwoStage:
    """Stage 1 keeps the top α b by accumulated attention A; stage 2 fills the rest by (A + ε) ‖V W_O‖.

    Stage 1 is there to bring σ above ½. For one query of one head, with ε = 0, A not pooled and σ₁ > ½, stage 2 then minimises the bound θ̂
    (Theorem 3.5); over a window, a group and with ε it is the heuristic that the paper runs.

    Attributes:
        alpha: the share of stage 1, in [0, 1]; 1 is attention-only selection.
        epsilon: added to A in stage 2, so that norms count where attention is almost 0. The paper's 1e-4 is absolute.
        epsilon_of: "absolute", or "uniform": ε is in units of 1/n, so that it weighs the same at every length.
        share_of: what α splits; the codes differ. "free" splits b − w, what is left beside the protected window; "budget"
            splits b and counts the window into stage 1, which then chooses max(⌊α b⌋ − w, 0) entries.
        norm: p of ‖V W_O‖_p, 1 as in the paper or 2.
        group: "product of means": the group's mean of A times its mean of norms, as in the public code; "mean of products" averages what
            each head's bound asks for.
    """

    alpha: float = 0.5
    epsilon: float = 1e-4
    share_of: Literal["free", "budget"] = "free"
    epsilon_of: Literal["absolute", "uniform"] = "absolute"
    norm: Literal[1, 2] = 1
    group: Literal["product of means", "mean of products"] = "product of means"

    source: ClassVar[str] = "CriticalKV, arXiv 2502.03805, Algorithm 1"

    def __post_init__(self) -> None:
        share("alpha", self.alpha)
        at_least("epsilon", self.epsilon, 0)
        one_of("share_of", self.share_of, "free", "budget")
        one_of("epsilon_of", self.epsilon_of, "absolute", "uniform")
        one_of("norm", self.norm, 1, 2)
        one_of("group", self.group, "product of means", "mean of products")

    def scores(
        self,
        importance: Float[Tensor, "batch heads keys"],
        seen: Observation,
        protected: Bool[Tensor, "batch _ keys"],
        free: Bool[Tensor, "batch _ keys"],
    ) -> Scores:
        """A and (A + ε) ‖V W_O‖ of the group."""
        norms, attention = seen.norms(self.norm), seen.grouped(importance)
        length = seen.valid.sum(-1)[..., None].to(importance.dtype)
        epsilon = self.epsilon / (length if self.epsilon_of == "uniform" else torch.ones_like(length))
        if self.group == "product of means":
            products = (attention + epsilon) * seen.grouped(norms)
        else:
            products = seen.grouped((importance + seen.per_head(epsilon)) * norms)
        return Scores(attention, protected, free, products)

    def first_stage(
        self, counts: Int[Tensor, "batch kv_heads"], protected: Int[Tensor, "batch _"]
    ) -> Int[Tensor, "batch kv_heads"]:
        """How many entries stage 1 chooses beside the protected ones."""
        if self.share_of == "free":
            return (self.alpha * (counts - protected).double() + 1e-9).floor().long()  # 0.29 · 100 is 29
        return ((self.alpha * counts.double() + 1e-9).floor().long() - protected).clamp(min=0)

    def choose(self, scores: Scores, counts: Int[Tensor, "batch kv_heads"]) -> Decision:
        """Stage 1 by attention, then stage 2 by the products over what is left."""
        assert scores.second is not None
        protected, free = scores.protected, scores.free
        held = scores.protected.sum(-1)
        first = best(scores.first, held + self.first_stage(counts, held), protected, free)
        return Decision(best(scores.second, counts, first, free), first)
