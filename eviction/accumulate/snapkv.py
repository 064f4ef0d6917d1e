"""SnapKV: an entry matters as much as the last queries of the prompt looked at it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from eviction.accumulate.near import nearby
from eviction.checks import odd, one_of, whole
from eviction.observation import Observation

Pooling = Literal["max", "mean", "none"]


@dataclass(frozen=True)
class SnapKV:
    """Attention of the last `window` queries, mean (or maximum) over them, pooled along the keys.

    s_{h,i} = pool_i(mean_t A_{h,t,i}) for the entries before the window, which is always kept. Source: SnapKV (arXiv 2404.14469),
    as arXiv 2502.03805 uses it (Algorithm 2); the maximum over the window is DefensiveKV's (arXiv 2510.13334).

    Attributes:
        window: how many of the last queries look, and how many entries are always kept.
        kernel: width of the pooling, an odd number of entries; 1 pools nothing.
        pooling: "max" as the papers write it, "mean" as much public code has it (over `kernel` places, 0 beyond the ends), or
            "none".
        over: "mean" or "max" over the window's queries.
    """

    window: int = 32
    kernel: int = 7
    pooling: Pooling = "max"
    over: Literal["mean", "max"] = "mean"

    source: ClassVar[str] = "SnapKV, arXiv 2404.14469"

    def __post_init__(self) -> None:
        whole("window", self.window, 1)
        odd("kernel", self.kernel)
        one_of("pooling", self.pooling, "max", "mean", "none")
        one_of("over", self.over, "mean", "max")

    @property
    def queries(self) -> int:
        """The window's."""
        return self.window

    @property
    def ends(self) -> tuple[int, int]:
        """The window is kept."""
        return 0, self.window

    def __call__(self, seen: Observation, protected: Bool[Tensor, "batch _ keys"]) -> Float[Tensor, "batch heads keys"]:
        """Scores of the entries before what is protected, in the dtype of the weights."""
        looked_at = seen.window_mean(self.window) if self.over == "mean" else seen.window_max(self.window)
        scored = seen.per_head(seen.valid & ~protected)
        if self.pooling == "none" or self.kernel == 1:
            return looked_at * scored
        return nearby(looked_at * scored, seen, self.kernel, self.pooling)
