"""The ablations: each a question, and the policies that answer it. Data alone; loads neither torch nor transformers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PAPERS_BUDGET = 0.2
BASE, CANDIDATE = "snapkv", "snapkv+two-stage"
ALPHAS = (0.0, 0.25, 0.3, 0.5, 0.7, 0.75, 1.0)
NARROW = 16
"""Window of the budget ablation: 2.5 % of 1,024 entries are fewer than 32."""


@dataclass(frozen=True)
class Ablation:
    """One ablation.

    Attributes:
        name: what the command line calls it.
        question: what it answers.
        variants: a label for each policy, written NAME:PARAMETER=VALUE:…; a parameter that is not named is the run's own. The first is what
            the others are held against.
        budgets: shares of the cache; None: the run's budget nearest to 20 %.
        lengths: tokens of each context; None: the run's own.
    """

    name: str
    question: str
    variants: Mapping[str, str]
    budgets: tuple[float, ...] | None = None
    lengths: tuple[int, ...] | None = None


def middle_budget(budgets: Iterable[float]) -> float:
    """The budget of what is measured, judged or drawn at one budget: the one nearest to the paper's 20 %, of two the smaller."""
    return min(budgets, key=lambda budget: (abs(budget - PAPERS_BUDGET), budget))


def _made(*ablations: Ablation) -> dict[str, Ablation]:
    return {one.name: one for one in ablations}


ABLATIONS = _made(
    Ablation(
        "alpha",
        "How much of the budget should stage 1 spend? α = 0 is one stage, α = 1 attention-only",
        {"attention-only": BASE, **{f"α = {alpha:g}": f"{CANDIDATE}:alpha={alpha:g}" for alpha in ALPHAS}},
    ),
    Ablation(
        "epsilon",
        "What does the ε do that stage 2 adds to the attention?",
        {
            "attention-only": BASE,
            "ε = 0": f"{CANDIDATE}:epsilon=0",
            "ε = 1e-4": f"{CANDIDATE}:epsilon=0.0001",
            "ε = 0.1 / n": f"{CANDIDATE}:epsilon=0.1:epsilon_of=uniform",
            "ε = 3 / n": f"{CANDIDATE}:epsilon=3:epsilon_of=uniform",
        },
    ),
    Ablation(
        "norm",
        "L1 or L2 of the projected values?",
        {"attention-only": BASE, "L1": f"{CANDIDATE}:norm=1", "L2": f"{CANDIDATE}:norm=2"},
    ),
    Ablation(
        "score",
        "What should an entry's attention be weighed with? One stage each, and two",
        {
            "A": BASE,
            "A‖V‖": "snapkv+norm:space=value",
            "A‖V W_O‖": "snapkv+norm",
            "A‖ν − o‖": "snapkv+centred",
            "two stages, ε = 0": f"{CANDIDATE}:epsilon=0",
            "two stages": CANDIDATE,
        },
    ),
    Ablation(
        "group",
        "Mean of products or product of means, where heads share an entry?",
        {
            "attention-only": BASE,
            "two stages, product of means": f"{CANDIDATE}:group=product of means",
            "two stages, mean of products": f"{CANDIDATE}:group=mean of products",
            "one stage, product of means": "snapkv+norm:group=product of means",
            "one stage, mean of products": "snapkv+norm:group=mean of products",
        },
    ),
    Ablation(
        "pooling",
        "How should scores be pooled along the keys?",
        {
            f"{label}, {selection}": f"{policy}:{settings}"
            for label, settings in (
                ("none", "pooling=none"),
                ("mean of 7", "pooling=mean:kernel=7"),
                ("max of 7", "pooling=max:kernel=7"),
            )
            for selection, policy in (("attention-only", BASE), ("two-stage", CANDIDATE))
        },
    ),
    Ablation(
        "window",
        "How many of the last queries should choose?",
        {
            f"{window}, {selection}": f"{policy}:window={window}"
            for window in (8, 16, 32, 64)
            for selection, policy in (("attention-only", BASE), ("two-stage", CANDIDATE))
        },
    ),
    Ablation(
        "budget",
        "At which cache sizes does two-stage selection help?",
        {"attention-only": f"{BASE}:window={NARROW}", "two-stage": f"{CANDIDATE}:window={NARROW}"},
        budgets=(0.025, 0.05, 0.1, 0.2, 0.4, 0.8),
    ),
    Ablation(
        "length",
        "Does it help more in longer prompts?",
        {"attention-only": BASE, "two-stage": CANDIDATE, "two-stage, ε = 0": f"{CANDIDATE}:epsilon=0"},
        lengths=(256, 512, 1024, 2048),
    ),
)
"""By name."""
IN_ONE_RUN = tuple(name for name, one in ABLATIONS.items() if one.lengths is None)
"""Those that a validation measures beside its own pair, on the same contexts."""
