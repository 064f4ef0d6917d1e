"""What an allocator is, and whole numbers that add up."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eviction.errors import BudgetError

_DIGITS = 9  # to which a fraction of an entry is told from the next, below what float64 rounds


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
    """Whole numbers as near to a multiple of `shares` as the limits let them, that add up to `total`.

    The multiple λ is the one at which Σ min(max(λ share, least), most) = total, so that what a limit cuts off goes to the others in
    proportion; then largest remainders, ties to the earlier. Where `total` is more than all with a share can take, those without one
    have the rest in equal parts. `total` is brought within the limits' sums.
    """
    total = min(max(total, sum(least)), sum(most))
    weights = [max(share, 0.0) for share in shares]
    taken = [high if weight else low for weight, low, high in zip(weights, least, most, strict=True)]
    if sum(taken) < total:  # λ has no end
        least = [high if weight else low for weight, low, high in zip(weights, least, most, strict=True)]
        weights = [0.0 if weight else 1.0 for weight in weights]
    exact = _levelled(weights, total, least, most)
    counts = [math.floor(round(number, _DIGITS)) for number in exact]
    remainders = [round(number - count, _DIGITS) for number, count in zip(exact, counts, strict=True)]
    for i in sorted(range(len(counts)), key=lambda i: (-remainders[i], i))[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _levelled(weights: list[float], total: int, least: list[int], most: list[int]) -> list[float]:
    """min(max(λ weight, least), most) that add up to `total`: those that a limit stops are set aside, till λ stops no other."""
    exact: list[float] = [0.0] * len(weights)
    open_units, rest = list(range(len(weights))), float(total)
    while open_units:
        size = sum(weights[i] for i in open_units)
        level = {i: rest * weights[i] / size if size else float(least[i]) for i in open_units}
        low, high = [i for i in open_units if level[i] < least[i]], [i for i in open_units if level[i] > most[i]]
        lifted, cut = sum(least[i] - level[i] for i in low), sum(level[i] - most[i] for i in high)
        # the side that weighs more stays stopped at the final λ, which lies towards it
        stopped, at = (low, least) if lifted >= cut and low else (high, most)
        if not stopped:
            exact = [level.get(i, number) for i, number in enumerate(exact)]
            break
        for i in stopped:
            exact[i] = float(at[i])
            rest -= at[i]
        open_units = [i for i in open_units if i not in stopped]
    return exact
