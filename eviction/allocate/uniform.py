"""The same budget for every head of every layer."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from eviction.allocate.base import Candidates, require_budget
from eviction.errors import BudgetError


@dataclass(frozen=True)
class Uniform:
    """b entries for each KV head, the protected ones counted: what SnapKV does."""

    scope: ClassVar[Literal["layer", "model"]] = "layer"
    source: ClassVar[str] = "SnapKV, arXiv 2404.14469"

    def __call__(self, layers: list[Candidates]) -> list[Int[Tensor, "batch kv_heads"]]:
        """b for every head, or all that it has."""
        return [layer.held + torch.minimum(layer.room, layer.most) for layer in layers]


def require_room(budget: int | float, keys: int, protected: int) -> int:
    """Entries per head that `budget` gives out of `keys`, if it holds more than the `protected` ones: what a study of selection needs.

    A policy by itself protects less where the budget is small; an experiment that compares selections has nothing to compare then.

    Raises:
        BudgetError: the budget is outside its range, or holds no more than the protected entries.
    """
    require_budget(budget)
    entries = math.floor(budget * keys + 0.5) if isinstance(budget, float) else min(budget, keys)
    if entries <= protected and entries < keys:
        raise BudgetError(
            f"budget {budget} of {keys} entries is {entries} a head, but the {protected} of the window are always kept "
            f"and counted: give at least {protected + 1} entries, that is {_percent(protected + 1, keys)} of this "
            f"context, a longer context or a smaller window"
        )
    return entries


def _percent(entries: int, keys: int) -> str:
    return f"{math.ceil(1000 * entries / keys) / 10:g} %"
