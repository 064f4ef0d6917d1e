"""A policy is three verbs, as in Algorithm 2 of arXiv 2502.03805: accumulate, allocate, select."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eviction.accumulate import Accumulate, SnapKV
from eviction.allocate import Allocate, Candidates, Uniform, uniform_entries
from eviction.observation import Observation, earliest, recent
from eviction.select import AttentionOnly, Decision, Scores, Select, TwoStage
from eviction.signs import Asked
from hooks.errors import UnsupportedAttention
from hooks.records import LayerRecord


@dataclass(frozen=True)
class Scored:
    """A layer that was looked at: its scores and what its budgets are made of. Small; the record is not held."""

    scores: Scores
    base: Int[Tensor, " batch"]
    layer: int
    carried: Float[Tensor, "batch heads keys"] | None = None
    """What the queries so far gave each entry, for an accumulator that adds up."""
    summed: bool = False
    """Whether scores are what removals do in nats, which add up over all that read an entry."""

    @property
    def candidates(self) -> dict[str, Any]:
        """As `Candidates` takes it."""
        return {
            "scores": self.scores.first,
            "free": self.scores.free,
            "protected": self.scores.protected.sum(-1),
            "base": self.base,
            "layer": self.layer,
        }


@dataclass(frozen=True)
class Policy:
    """A frozen composition of the three verbs; equal settings are equal policies."""

    name: str
    accumulate: Accumulate = field(default_factory=SnapKV)
    allocate: Allocate = field(default_factory=Uniform)
    select: Select = field(default_factory=AttentionOnly)

    @property
    def window(self) -> int | None:
        """The queries that must be captured for this policy to decide; None for all."""
        asked = [self.accumulate.queries, getattr(self.select, "window", 1)]
        return None if None in asked else max(count for count in asked if count is not None)

    @property
    def behaviour(self) -> Asked | None:
        """How the KL of removals is estimated, which takes another run of the window's tokens; None where it is not asked for."""
        return getattr(self.accumulate, "behaviour", None)

    @property
    def pool(self) -> float | None:
        """Of how many entries, in units of the uniform budget, the selection needs sketches; None for no such selection."""
        return getattr(self.select, "pool", None)

    @property
    def adds_up(self) -> bool:
        """Whether importance is a sum over all queries so far, which a cache must carry to choose again."""
        return self.accumulate.queries is None and getattr(self.accumulate, "adds_up", False)

    def score(self, record: LayerRecord | Observation, budget: int | float) -> Scored:
        """The first look at a layer: importance, what is protected, and the uniform budget of each row.

        The ends that the accumulator protects are kept as far as the budget holds them and one more entry; a row whose budget is
        all of it keeps all of it.

        Raises:
            BudgetError: the budget is outside its range.
            ValueError: scores are not finite.
        """
        seen = record if isinstance(record, Observation) else Observation(record)
        base, protected, free = self.parts(seen, budget)
        importance = self.accumulate(seen, protected)
        scores = self.select.scores(importance, seen, protected, free)
        carried = importance if self.adds_up else None
        nats = self.behaviour is not None and isinstance(self.select, AttentionOnly)
        return Scored(scores, base, seen.record.layer, carried, nats)

    def parts(
        self, seen: Observation, budget: int | float
    ) -> tuple[Int[Tensor, " batch"], Bool[Tensor, "batch _ keys"], Bool[Tensor, "batch _ keys"]]:
        """The uniform budget of each row, the entries that are kept anyway, and those that may be chosen."""
        valid = seen.valid
        lengths = valid.sum(-1)  # of each row, or of each of its heads
        base = uniform_entries(budget, seen.rows_entries)
        start, end = self.accumulate.ends
        room = torch.where(base[:, None] >= lengths, lengths, base[:, None] - 1)
        held = earliest(valid, room.clamp(max=start))
        protected = held | recent(valid, (room - held.sum(-1)).clamp(max=end))
        return base, protected, valid & ~protected

    def decide(self, record: LayerRecord | Observation, budget: int | float) -> Decision:
        """Which of the layer's entries stay, from what its attention used in the prefill.

        Args:
            record: the layer's capture, with at least `window` queries (fewer where the prompt has fewer).
            budget: entries per KV head, or a fraction of each row's entries (pads apart).

        Raises:
            BudgetError: the budget is outside its range.
            ValueError: scores are not finite, or budgets depend on the other layers (`decide_all` then).
        """
        if self.allocate.scope != "layer":
            raise ValueError(f"{self.name} allocates over all layers at once: use decide_all with every layer's scores")
        return self.decide_all([self.score(record, budget)])[0]

    def decide_all(self, layers: Sequence[Scored]) -> list[Decision]:
        """The decisions of layers that were scored, all of a model's where budgets are allocated over them."""
        asked = [Candidates(**layer.candidates, n_layers=len(layers)) for layer in layers]
        if self.allocate.scope == "model":
            counts = self.allocate(asked)
        else:
            counts = [self.allocate([one])[0] for one in asked]
        return [self.select.choose(layer.scores, count) for layer, count in zip(layers, counts, strict=True)]


def merged(scored: Sequence[Scored]) -> Scored:
    """One for all the calls that read the same entries: the mean of their scores, or the sum where they are nats.

    Raises:
        ValueError: they do not see the same entries.
        UnsupportedAttention: they are several, and their scores have sketches.
    """
    one = scored[0]
    if len(scored) == 1:
        return one
    if one.scores.sketch is not None:
        raise UnsupportedAttention(
            f"layers {one.layer} and {scored[1].layer} read the same entries: what removing several of them does together is not sketched"
        )
    for other in scored[1:]:
        if not torch.equal(other.scores.free, one.scores.free) or not torch.equal(other.scores.protected, one.scores.protected):
            raise ValueError(f"layers {one.layer} and {other.layer} read the same entries, but do not see the same of them")
    all_first = torch.stack([each.scores.first for each in scored])
    first = all_first.sum(0) if one.summed else all_first.mean(0)
    seconds = [each.scores.second for each in scored if each.scores.second is not None]
    return replace(one, scores=replace(one.scores, first=first, second=torch.stack(seconds).mean(0) if seconds else None))


def snapkv(**settings: Any) -> Policy:
    """SnapKV with attention-only selection; `settings` are those of `SnapKV` (window, kernel, pooling)."""
    return Policy("snapkv", SnapKV(**settings))


def snapkv_two_stage(alpha: float = 0.5, epsilon: float = 1e-4, **settings: Any) -> Policy:
    """SnapKV with CriticalKV's two-stage selection."""
    return Policy("snapkv+two-stage", SnapKV(**settings), select=TwoStage(alpha, epsilon))
