"""From samples to what a table shows: means with intervals, changes against the full cache, what goes with the score. DataFrame in and out."""

from typing import Any

import pandas as pd

from analysis.schema import FULL, RIGHT, SCORES
from analysis.statistics import Estimate, adjusted, compare, mean, mean_score, proportion, rank_correlation

SAMPLE = ["model", "source", "length", "question", "seed", "sample"]
"""What tells samples apart."""
TASK = ["model", "source", "task", "length", "question"]
BY = [*TASK, "policy", "budget"]
RESAMPLES = 999
PREDICTORS = ("perturbation", "relative_perturbation", "theta", "retained_mass", "kl", "agreement")


def scores(samples: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """The table `SCORES` of rows of `SAMPLES`; the full cache first, then policies in the order of the rows, budgets ascending."""
    rows = []
    for group, part in samples.groupby(BY, sort=False):
        keys: tuple[Any, ...] = tuple(group)  # type: ignore[arg-type]
        full = keys[BY.index("policy")] == FULL
        score, kl = mean_score(part["score"], seed), mean(part["kl"], seed)
        change = compare(part["score"], part["full_score"], seed)
        right = int((part["full_score"] >= RIGHT).sum())
        flipped = proportion(int(part["flipped"].sum()), right) if right else Estimate(*[float("nan")] * 3)
        rows.append(
            {
                **dict(zip(BY, keys, strict=True)),
                "samples": len(part),
                **_spread("score", score),
                **_spread("change", Estimate(*change[:3])),
                "p": change.p,
                "p_adjusted": float("nan") if full else change.p,
                **_spread("flipped", flipped),
                **_spread("kl", kl),
                **_spread("perturbation", mean(part["perturbation"].dropna(), seed)),
                "bytes_share": float((part["bytes"] / part["full_bytes"]).mean()),
            }
        )
    found = pd.DataFrame(rows)
    found["p_adjusted"] = adjusted(found["p_adjusted"])
    return SCORES.checked(found)


def _spread(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _ranked(rows: pd.DataFrame, within: list[str]) -> pd.DataFrame:
    found = rows.copy()
    for name in (*PREDICTORS, "change"):
        found[name] = rows.groupby(within)[name].rank(pct=True)
    return found


def predictors(samples: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Does what an eviction does to attention, or to the distribution, go with the score? Rank correlations with intervals.

    A row per task and predictor: Spearman's ρ of each of `PREDICTORS` with `score − full_score` over all evicted rows; and for all tasks
    together ("all tasks"), at all budgets and at each: there rows are ranked within their model, task and length first, and within the
    budget where it is one. Samples are drawn together with all their rows. ρ is negative where more perturbation goes with a lower score.
    NaN where the score never changes.
    """
    evicted = samples[samples["policy"] != FULL]
    evicted = evicted.assign(change=evicted["score"] - evicted["full_score"], unit=evicted.groupby(SAMPLE, sort=False).ngroup())
    parts: list[tuple[str, str, pd.DataFrame]] = [("all tasks", "all budgets", _ranked(evicted, TASK))]
    parts += [("all tasks", f"{budget:g}", part) for budget, part in _ranked(evicted, [*TASK, "budget"]).groupby("budget")]
    parts += [(str(task), "all budgets", part) for task, part in evicted.groupby("task", sort=False)]
    rows = []
    for task, budget, part in parts:
        for name in PREDICTORS:
            known = part[part[name].notna()]
            found = rank_correlation(known[name], known["change"], list(known["unit"]), seed, RESAMPLES)
            rows.append({"task": task, "budget": budget, "predictor": name, "rows": len(known), **_spread("rho", found)})
    return pd.DataFrame(rows)
