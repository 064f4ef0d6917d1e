"""What a validation chooses by: the pair that it compares, at every budget, and the variants of its ablations."""

from dataclasses import dataclass

import pandas as pd

from analysis.ablations import ABLATIONS, BASE, CANDIDATE
from analysis.errors import InputError
from analysis.experiments.rows import Choice
from analysis.grid import split_policy
from analysis.settings import ValidationSettings
from eviction import BudgetError, Policy, policy
from eviction.allocate import require_room


@dataclass(frozen=True)
class Choices:
    """Policies by the text that names them in the rows, and at which budgets each is asked."""

    policies: dict[str, Policy]
    asked: tuple[Choice, ...]
    """Those that differ from each other."""
    same: dict[Choice, Choice]
    """Of those that are one of `asked` in other words, which: a variant that says what the run's settings say anyway."""

    def within(self, length: int) -> "Choices":
        """Those whose window, and more, a budget of a prompt of `length` tokens holds."""
        asked = tuple(choice for choice in self.asked if self._fits(choice, length))
        return Choices(self.policies, asked, {alias: known for alias, known in self.same.items() if known in asked})

    def _fits(self, choice: Choice, length: int) -> bool:
        window = self.policies[choice[0]].window or 0
        try:
            require_room(choice[1], length, window)
        except BudgetError:
            return False
        return window < length

    def in_all_words(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows of `asked`, and the same again for each choice that is one of them in other words."""
        parts = [rows]
        for (alias, _), (name, budget) in self.same.items():
            parts.append(rows[(rows["policy"] == name) & (rows["budget"] == budget)].assign(policy=alias))
        return pd.concat(parts, ignore_index=True)


def choices(settings: ValidationSettings) -> Choices:
    """The pair at every budget of the settings, then each variant at its ablation's.

    Raises:
        InputError: a variant has parameters that no policy has.
    """
    asked = [(name, budget) for name in (BASE, CANDIDATE) for budget in settings.budgets]
    for name in settings.ablations:
        ablation = ABLATIONS[name]
        budgets = ablation.budgets or (settings.middle_budget,)
        asked += [(text, budget) for text in ablation.variants.values() for budget in budgets]
    policies = {text: made(text, settings) for text, _ in asked}
    first: dict[tuple[Policy, float], Choice] = {}
    for choice in asked:
        first.setdefault((policies[choice[0]], choice[1]), choice)
    known = {choice: first[policies[choice[0]], choice[1]] for choice in asked}
    return Choices(policies, tuple(first.values()), {choice: one for choice, one in known.items() if choice != one})


def made(text: str, settings: ValidationSettings) -> Policy:
    """The policy of a variant's text; what the text does not say is as the settings say."""
    name, given = split_policy(text)
    own = {"window": settings.window, "kernel": settings.kernel, "pooling": settings.pooling}
    if name.endswith("+two-stage"):
        own |= {"alpha": settings.alpha, "epsilon": settings.epsilon}
    try:
        return policy(name, **{**own, **given})
    except (ValueError, TypeError) as error:
        raise InputError(f"{text}: {error}") from error


def others(settings: ValidationSettings) -> dict[str, Policy]:
    """Policies beside the compared pair, by name: those that divide a budget over heads or layers, ours, and the baselines."""
    return {
        **{name: made(name, settings) for name in ("adakv", "adakv+two-stage")},
        "fisher": policy("fisher", window=settings.window, seed=settings.seed),
        "start-recent": policy("start-recent"),
        "random": policy("random", recent=settings.window, seed=settings.seed),
    }
