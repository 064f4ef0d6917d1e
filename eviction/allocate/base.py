"""What an allocator is, and whole numbers that add up."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eviction.errors import BudgetError


@dataclass(frozen=True)
class Candidates:
    """What one layer asks an allocator for.

    `scores` [batch, kv_heads, keys] rank the entries, `free` are those that may still be chosen (no pads, nothing protected), `protected`
    counts the entries that are kept anyway, `base` [batch] is the uniform budget with them, `layer` the layer's place. Where all KV
    heads hold the same entries, `free` and `protected` have one row for them.
    """

    scores: Float[Tensor, "batch kv_heads keys"]
    free: Bool[Tensor, "batch _ keys"]
    protected: Int[Tensor, "batch _"]
    base: Int[Tensor, " batch"]
    layer: int
    n_layers: int

    @property
    def held(self) -> Int[Tensor, "batch kv_heads"]:
        """Protected entries of each head."""
        return self.protected.expand(-1, self.n_kv_heads)

    @property
    def room(self) -> Int[Tensor, "batch kv_heads"]:
        """Entries of the uniform budget beside the protected ones; not below 0."""
        return (self.base[:, None] - self.held).clamp(min=0)

    @property
    def most(self) -> Int[Tensor, "batch kv_heads"]:
        """Entries that each head can choose at most."""
        return self.free.sum(-1).expand(-1, self.n_kv_heads)

    @property
    def n_kv_heads(self) -> int:
        """K."""
        return self.scores.shape[1]


@runtime_checkable
class Allocate(Protocol):
    """The second verb: how many entries each KV head keeps, the protected ones counted.

    Budgets add up to `base` times the KV heads (over the layer, or over all layers where `scope` is "model"), to the entry; no head gets less
    than what is protected or more than it has, and none is left with nothing.
    """

    scope: ClassVar[Literal["layer", "model"]]
    source: ClassVar[str]

    def __call__(self, layers: list[Candidates]) -> list[Int[Tensor, "batch kv_heads"]]:
        """Counts for each layer: one layer at a time where `scope` is "layer", else all of them at once."""


def require_budget(budget: int | float) -> None:
    """Refuse what is no budget.

    Raises:
        BudgetError: it is neither a number of entries of at least 1 nor a fraction in (0, 1].
    """
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise BudgetError(f"a budget is a number of entries or a fraction, not {budget!r}")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise BudgetError(f"a fractional budget lies in (0, 1], not at {budget}")
    if budget < 1 and not isinstance(budget, float):
        raise BudgetError(f"a budget is at least 1 entry, not {budget}")


def uniform_entries(budget: int | float, lengths: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """b of each row: an integer is a number of entries, capped at the row's length; a float a fraction of it in (0, 1], rounded to
    the nearest entry (halves up). At least 1.

    Raises:
        BudgetError: the budget is outside its range.
    """
    require_budget(budget)
    if isinstance(budget, float):
        return torch.tensor([max(1, math.floor(budget * length + 0.5)) for length in lengths.tolist()], device=lengths.device)
    return lengths.clamp(max=budget)


def apportion(shares: list[float], total: int, least: list[int], most: list[int]) -> list[int]:
    """Whole numbers as near to `shares` (of any sum) · `total` as the limits let them, that add up to `total`.

    Largest remainders, ties to the earlier; what a limit cuts off goes to the others in proportion. `total` is brought within the limits' sums.
    """
    total = min(max(total, sum(least)), sum(most))
    counts, open_units = list(least), [i for i in range(len(shares)) if least[i] < most[i]]
    rest = total - sum(counts)
    weights = [max(share, 0.0) for share in shares]
    wanted = _wanted(weights, total)
    while rest and open_units:
        lacking = {i: max(wanted[i] - counts[i], 0.0) for i in open_units}
        size = sum(lacking.values())
        if size == 0:
            lacking, size = dict.fromkeys(open_units, 1.0), float(len(open_units))
        exact = {i: rest * lacking[i] / size for i in open_units}
        given = {i: min(math.floor(exact[i] + 1e-9), most[i] - counts[i]) for i in open_units}
        if not any(given.values()):  # less than one each: the largest remainders get one
            order = sorted(open_units, key=lambda i: (-exact[i], i))[:rest]
            given = dict.fromkeys(order, 1)
        for i, more in given.items():
            counts[i] += more
        rest = total - sum(counts)
        open_units = [i for i in open_units if counts[i] < most[i]]
    return counts


def _wanted(weights: list[float], total: int) -> list[float]:
    size = sum(weights)
    return [total * (weight / size if size > 0 else 1 / len(weights)) for weight in weights]
