"""A decision is a value: which entries stay, and which of them the first stage chose."""

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from eviction.live import Sketch
from eviction.observation import Observation
from eviction.select.top import best


@dataclass(frozen=True)
class Decision:
    """Entries kept, per batch row and KV head.

    `keep` [batch, kv_heads, keys] holds the protected entries and everything selected. `stage1`, where the selection has
    stages, holds what was certain before stage 2 began: the first stage's choice and the protected entries.
    """

    keep: Bool[Tensor, "batch kv_heads keys"]
    stage1: Bool[Tensor, "batch kv_heads keys"] | None = None


@dataclass(frozen=True)
class Scores:
    """What a layer's selection needs once budgets are known, and no more than that, so that it can wait for other layers.

    `first` ranks the entries, and is what budgets are allocated by; `second` is stage 2's ranking, or what else the selection
    asks for, `sketch` what removals do together. `protected` entries are kept, `free` ones may be.
    """

    first: Float[Tensor, "batch kv_heads keys"]
    protected: Bool[Tensor, "batch _ keys"]
    free: Bool[Tensor, "batch _ keys"]
    second: Float[Tensor, "batch kv_heads keys"] | None = None
    sketch: Sketch | None = None


@runtime_checkable
class Select(Protocol):
    """The third verb: scores from importance, and a choice once each head's count is known."""

    source: ClassVar[str]

    def scores(
        self,
        importance: Float[Tensor, "batch heads keys"],
        seen: Observation,
        protected: Bool[Tensor, "batch _ keys"],
        free: Bool[Tensor, "batch _ keys"],
    ) -> Scores:
        """Numbers per KV head, from those per query head."""

    def choose(self, scores: Scores, counts: Int[Tensor, "batch kv_heads"]) -> Decision:
        """Exactly `counts` entries of each KV head."""


class OneRanking:
    """A selection that keeps the highest of its first scores."""

    def choose(self, scores: Scores, counts: Int[Tensor, "batch kv_heads"]) -> Decision:
        """The highest."""
        return Decision(best(scores.first, counts, scores.protected, scores.free))
