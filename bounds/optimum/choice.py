"""What may be chosen, and what was."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Optimum:
    """The best choice found, one per row (a KV head, or a query of a head).

    `value` is the objective at `keep`; `lower` is what no choice can beat, equal to `value` where the optimum is `proved` and 0 where
    nothing is known.
    """

    keep: Bool[Tensor, "*rows keys"]
    value: Float[Tensor, "*rows"]
    lower: Float[Tensor, "*rows"]

    @property
    def proved(self) -> Bool[Tensor, "*rows"]:
        """Whether no choice is better."""
        return self.lower >= self.value


def limits(
    shape: tuple[int, ...], budget: int | None, protected: Tensor | None, candidates: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What must be kept and what may be kept [*rows, keys]; pads are no candidates. None: the rows' budgets are what they are.

    Raises:
        ValueError: the budget is less than what is protected or more than what may be kept, or an entry is protected that is no candidate.
    """
    must = torch.zeros(shape, dtype=torch.bool, device=device) if protected is None else protected.expand(shape)
    may = torch.ones(shape, dtype=torch.bool, device=device) if candidates is None else candidates.expand(shape)
    if bool((must & ~may).any()):
        raise ValueError(
            f"{int((must & ~may).sum())} entries are protected but no candidates: an entry cannot be both kept and barred"
        )
    if budget is None:
        return must, may
    low, high = int(must.sum(-1).max()), int(may.sum(-1).min())
    if not max(low, 1) <= budget <= high:
        raise ValueError(
            f"a budget of {budget} entries is out of range: {low} are protected and {high} may be kept, and at least 1 must be"
        )
    return must, may


def least(values: Float[Tensor, " all"], count: int) -> Int[Tensor, " count"]:
    """Where the `count` least values stand, the least first, of equals the earlier: a stable sort's beginning, without sorting what follows."""
    if len(values) <= count:
        return values.argsort(stable=True)
    places = (values <= values.topk(count, largest=False).values.max()).nonzero()[:, 0]
    return places[values[places].argsort(stable=True)[:count]]
