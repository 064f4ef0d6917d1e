"""TOVA: an entry matters as much as the last query looked at it, over all heads."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from eviction.checks import one_of
from eviction.observation import Observation


@dataclass(frozen=True)
class TOVA:
    """A_{T,i} of the last query, averaged over all heads of the layer, so that every head keeps the same tokens.

    Source: TOVA (arXiv 2401.06104).

    Attributes:
        over_heads: "layer" as in the paper, or "head" for each head by itself.
    """

    over_heads: Literal["layer", "head"] = "layer"

    source: ClassVar[str] = "TOVA, arXiv 2401.06104"

    def __post_init__(self) -> None:
        one_of("over_heads", self.over_heads, "layer", "head")

    @property
    def queries(self) -> int:
        """The last one."""
        return 1

    @property
    def ends(self) -> tuple[int, int]:
        """Nothing is kept for its place."""
        return 0, 0

    def __call__(self, seen: Observation, protected: Bool[Tensor, "batch _ keys"]) -> Float[Tensor, "batch heads keys"]:
        """The last query's attention."""
        last = seen.window_mean(1)
        return last if self.over_heads == "head" else last.mean(1, keepdim=True).expand_as(last)
