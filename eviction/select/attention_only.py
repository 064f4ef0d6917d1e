"""What every method before CriticalKV does: keep the entries with the most accumulated attention."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from eviction.checks import one_of
from eviction.observation import Observation
from eviction.select.decision import OneRanking, Scores


@dataclass(frozen=True)
class AttentionOnly(OneRanking):
    """The top b − w by accumulated importance, beside the w protected entries.

    Minimises the relaxed bound 2 M (1 − σ), M = max_i ‖ν_i‖ (arXiv 2502.03805, section 3.3).

    Attributes:
        group: "mean" or "max" over the heads that share a KV head.
    """

    group: Literal["mean", "max"] = "mean"

    source: ClassVar[str] = "CriticalKV, arXiv 2502.03805, section 3.3"

    def __post_init__(self) -> None:
        one_of("group", self.group, "mean", "max")

    def scores(
        self,
        importance: Float[Tensor, "batch heads keys"],
        seen: Observation,
        protected: Bool[Tensor, "batch _ keys"],
        free: Bool[Tensor, "batch _ keys"],
    ) -> Scores:
        """The group's importance."""
        return Scores(seen.grouped(importance, self.group), protected, free)
