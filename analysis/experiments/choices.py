"""What a validation chooses by: the pair that it compares, at every budget, and the variants of its ablations."""

from dataclasses import dataclass

from analysis.ablations import ABLATIONS, BASE, CANDIDATE
from analysis.errors import InputError
from analysis.experiments.rows import Choice
from analysis.grid import split_policy
from analysis.settings import ValidationSettings
from eviction import Policy, policy


@dataclass(frozen=True)
class Choices:
    """Policies by the text that names them in the rows, and at which budgets each is asked."""

    policies: dict[str, Policy]
    asked: tuple[Choice, ...]

    @property
    def window(self) -> int:
        """The most queries that one of them looks at."""
        return max(one.window or 0 for one in self.policies.values())


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
    unique = dict.fromkeys(asked)
    return Choices({text: made(text, settings) for text, _ in unique}, tuple(unique))


def made(text: str, settings: ValidationSettings) -> Policy:
    """The policy of a variant's text; what the text does not say is as the settings say."""
    name, given = split_policy(text)
    own = {"window": settings.window, "kernel": settings.kernel, "pooling": settings.pooling}
    if name == CANDIDATE:
        own |= {"alpha": settings.alpha, "epsilon": settings.epsilon}
    try:
        return policy(name, **{**own, **given})
    except (ValueError, TypeError) as error:
        raise InputError(f"{text}: {error}") from error


def others(settings: ValidationSettings) -> dict[str, Policy]:
    """Policies beside the compared pair, by name: those that divide a budget over heads or layers, ours, and the baselines."""
    pooled = {"window": settings.window, "kernel": settings.kernel, "pooling": settings.pooling}
    staged = {"alpha": settings.alpha, "epsilon": settings.epsilon}
    return {
        BASE: policy(BASE, **pooled),
        CANDIDATE: policy(CANDIDATE, **pooled, **staged),
        "adakv": policy("adakv", **pooled),
        "adakv+two-stage": policy("adakv+two-stage", **pooled, **staged),
        "fisher": policy("fisher", window=settings.window, seed=settings.seed),
        "start-recent": policy("start-recent"),
        "random": policy("random", recent=settings.window, seed=settings.seed),
    }
