"""What an accumulator is."""

from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from eviction.observation import Observation


@runtime_checkable
class Accumulate(Protocol):
    """The first verb: from what attention used to one number per query head and entry, higher for what matters more.

    Numbers are finite and not negative, in float32 or better; `queries` is how many of the last queries it looks at (None: all), `source` the
    paper that it comes from.
    """

    source: ClassVar[str]

    @property
    def queries(self) -> int | None:
        """Queries that must be captured, None for all of the prompt's."""

    @property
    def ends(self) -> tuple[int, int]:
        """Entries that are always kept, at the start and at the end, as far as the budget holds them."""

    def __call__(self, seen: Observation, protected: Bool[Tensor, "batch _ keys"]) -> Float[Tensor, "batch heads keys"]:
        """Importance of every entry; what it says of protected entries and of pads is not looked at."""
