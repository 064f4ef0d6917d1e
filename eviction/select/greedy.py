"""Removals are counted together: entries go by what each adds to the KL of those that went before."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eviction.checks import at_least, share, whole
from eviction.observation import Observation
from eviction.select.decision import Decision, Scores
from eviction.select.top import best


@dataclass(frozen=True)
class Greedy:
    """The growing set of what is evicted takes the entries with the least marginal KL, ‖r_i‖² + 2 λ r_i·Σ_E r_j, in rounds.

    r_i is what removing entry i does along the directions of the KL's quadratic form (`Sketch`), so that ‖Σ_E r_j‖² is the KL of removing
    a set, to second order and with attention not renormalised in between; the set is that of all KV heads of a layer. Counts of heads follow
    the ranking by single removals. What the accumulator adds to an entry's own KL (dilation) counts here too. Source: the greedy pass of
    arXiv 2610.06479, on our sketch.

    Attributes:
        pool: candidates, in units of the uniform budget; what is outside goes first.
        weight: λ, in [0, 1]: directions are a sample, and what they say of pairs is noisier than of single entries.
        rounds: in which the pool is gone through; in each the marginals are computed anew.
    """

    pool: float = 2.0
    weight: float = 1.0
    rounds: int = 32

    source: ClassVar[str] = "arXiv 2610.06479, on the sketch of docs/theory.md K4"

    def __post_init__(self) -> None:
        at_least("pool", self.pool, 1)
        share("weight", self.weight)
        whole("rounds", self.rounds, 1)

    def scores(
        self,
        importance: Float[Tensor, "batch heads keys"],
        seen: Observation,
        protected: Bool[Tensor, "batch _ keys"],
        free: Bool[Tensor, "batch _ keys"],
    ) -> Scores:
        """The KL of single removals, and the sketch.

        Raises:
            ValueError: the observation has none: the accumulator does not estimate the KL of removals, or saw a record alone.
        """
        if seen.sketch is None:
            raise ValueError(
                "greedy selection needs sketches of removals: use it as fisher+greedy or straight-through+greedy, where a model runs"
            )
        return Scores(seen.grouped(importance), protected, free, sketch=seen.sketch)

    def choose(self, scores: Scores, counts: Int[Tensor, "batch kv_heads"]) -> Decision:
        """What the rounds leave of the pool; if that is fewer than a head's count, the highest outside of it too."""
        sketch = scores.sketch
        assert sketch is not None
        pool, along, gone = sketch.pool, sketch.along, sketch.rest.sum(1)
        kept = scores.protected.expand_as(scores.first)
        may = scores.free.expand_as(scores.first).gather(-1, pool)  # what is protected or not there does not go
        if sketch.inside is not None:
            may &= sketch.inside
        single = along.square().sum(-1)
        alone = torch.maximum(scores.first.gather(-1, pool), single)
        going = (may.sum(-1) - (counts - kept.sum(-1)).clamp(min=0)).clamp(min=0)
        left = may.clone()
        for number in range(self.rounds):
            # ever fewer at a time: what goes last is what matters
            goal = (going * (1 - (1 - (number + 1) / self.rounds) ** 2)).round().long()
            marginal = alone + 2 * self.weight * torch.einsum("bd,bkmd->bkm", gone, along)
            # of equal ones the later goes first
            out = best(-marginal.flip(-1), goal - (may & ~left).sum(-1), torch.zeros_like(left), left.flip(-1)).flip(-1)
            gone = gone + (along * out[..., None]).sum((1, 2))
            left &= ~out
        first = kept | torch.zeros_like(kept).scatter(-1, pool, left)
        return Decision(best(scores.first, counts, first & (scores.free | scores.protected), scores.free | scores.protected))
