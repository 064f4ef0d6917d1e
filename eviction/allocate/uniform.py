"""The same budget for every head of every layer."""

import math
from dataclasses import dataclass

from eviction.errors import BudgetError


@dataclass(frozen=True)
class Uniform:
    """b entries for each KV head, the protected ones counted: what SnapKV does."""

    def __call__(self, budget: int | float, keys: int, protected: int) -> int:
        """Entries that each KV head keeps out of `keys`.

        An integer is a number of entries, capped at `keys`. A float is a fraction of `keys` in (0, 1], rounded to the
        nearest entry (halves up). Exact to the entry; never less than one entry beyond the `protected` ones.

        Raises:
            BudgetError: the budget is outside its range, or holds no more than the protected entries.
        """
        if isinstance(budget, float):
            if not (0 < budget <= 1):
                raise BudgetError(f"a fractional budget lies in (0, 1], not at {budget}")
            entries = math.floor(budget * keys + 0.5)
        else:
            if budget < 1:
                raise BudgetError(f"a budget is at least 1 entry, not {budget}")
            entries = min(budget, keys)
        if entries <= protected and entries < keys:
            raise BudgetError(
                f"budget {budget} of {keys} entries is {entries} a head, but the {protected} of the window are always kept "
                f"and counted: give at least {protected + 1} entries, that is {_percent(protected + 1, keys)} of this "
                f"context, a longer context or a smaller window"
            )
        return entries


def _percent(entries: int, keys: int) -> str:
    return f"{math.ceil(1000 * entries / keys) / 10:g} %"
