"""What a claim is, and when it holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Literal

import pandas as pd

from analysis.statistics import Estimate

Tables = Mapping[str, pd.DataFrame]
Measure = Callable[[Tables], pd.Series | Estimate | None]
"""From a run's tables to one value for each context, or to an estimate; None (or nothing) where the rows are not there."""


MIDDLE, BUDGETS = "{middle}", "{budgets}"
"""In what a claim says of its measurement: the budget of what is measured at one budget, and all of the run's."""


@dataclass(frozen=True)
class Rule:
    """When a measured value speaks for a claim.

    Attributes:
        sense: `above` and `below`: it lies beyond the threshold. `within`: it lies in [−threshold, threshold]. `exactly`: it is the threshold,
            with no interval: for what is a theorem.
        threshold: that.
        only: the one verdict that the measure can give, where it bounds the truth from one side alone; else None. What would be the other is
            undecided then.
    """

    sense: Literal["above", "below", "within", "exactly"]
    threshold: float
    only: Literal["holds", "does not hold here"] | None = None

    def __str__(self) -> str:
        sign = {"above": ">", "below": "<", "within": "within ±", "exactly": "="}[self.sense]
        return f"{sign}{'' if self.sense == 'within' else ' '}{self.threshold:g}"


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        id: C of CriticalKV, B of the behaviour paper, O ours, Q one of the open questions; a variant of ours has a name behind a dot.
        statement: what is claimed.
        source: paper and place.
        paper_setting: on what the source measured it.
        paper_value: what it reports; None where it gives no number.
        how: what is measured here, and how that differs from the source; `MIDDLE` and `BUDGETS` are filled in.
        quantity: what the measured value is.
        rule: when it holds.
        measure: from rows to values.
        command: what measures it where a run has not; `{run}` stands for the run's own model and texts, `{model}` for the model alone.
        over: what its values are drawn over: contexts, or the samples of a group of tasks.
        needs: policies and choices without which it cannot be measured; where a run could not make one, the ledger says why.
    """

    id: str
    statement: str
    source: str
    paper_setting: str
    paper_value: str | None
    how: str
    quantity: str
    rule: Rule
    measure: Measure
    command: str = "criticalkv validate{run}"
    over: Literal["contexts", "ruler", "longbench"] = "contexts"
    needs: tuple[str, ...] = ()

    @property
    def decided_by(self) -> str:
        """The statement, and what decides it: `…: share of heads > 0.5`."""
        return f"{self.statement} [{self.quantity} {self.rule}]"


def verdict(rule: Rule, found: Estimate) -> str:
    """One of `analysis.schema.VERDICTS`: decided only where the whole interval lies on one side.

    One context has no interval: then, unless the rule is that of a theorem, nothing is decided.
    """
    value, low, high = found
    if isnan(value):
        return "not measured"
    if rule.sense == "exactly":
        return "holds" if value == rule.threshold else "does not hold here"
    if isnan(low) or isnan(high):
        return "undecided"
    if rule.sense == "within":
        holds, fails = -rule.threshold <= low and high <= rule.threshold, low > rule.threshold or high < -rule.threshold
    elif rule.sense == "above":
        holds, fails = low > rule.threshold, high <= rule.threshold
    else:
        holds, fails = high < rule.threshold, low >= rule.threshold
    said = "holds" if holds else "does not hold here" if fails else "undecided"
    return said if rule.only in (None, said) else "undecided"
