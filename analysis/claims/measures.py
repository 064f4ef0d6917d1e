"""From a run's rows to one number for each context. Each function returns a measure, which gives None where its rows are not there."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from analysis.ablations import BASE, CANDIDATE, NARROW, middle_budget
from analysis.claims.rules import Measure, Tables
from analysis.schema import ENTRIES, FULL, HEADS, LAYERS, RUNS, SAMPLES, SINGLE, TIMINGS
from analysis.statistics import Estimate, largest_mean, mean, proportion, ratio_of_means
from analysis.summary import relative_change
from analysis.tasks import GROUPS

SMALL, LARGE = 0.1, 0.4
"""Caches that the behaviour paper calls small go up to the one; the other is where CriticalKV reports RULER."""


def middle(tables: Tables) -> float | None:
    """The budget of what is measured at one budget: that of the compared pair nearest to 20 %."""
    heads = tables[HEADS.name]
    budgets = heads.loc[heads["policy"] == CANDIDATE, "budget"].unique()
    return middle_budget(budgets) if len(budgets) else None


def column(name: str, *, queries: str = "first") -> Measure:
    """The mean over heads of a column of `heads` under two-stage selection, at the middle budget, in L1."""

    def measure(tables: Tables) -> pd.Series | None:
        chosen = _heads(tables, CANDIDATE, middle(tables), queries)
        return None if chosen is None else chosen[name].groupby("context").mean()

    return measure


def improved(candidate: str = CANDIDATE, base: str = BASE, *, queries: str = "first") -> Measure:
    """Share of heads whose L is lower under `candidate`; a tie counts ½, and heads that the base does not perturb count not."""

    def measure(tables: Tables) -> pd.Series | None:
        heads = tables[HEADS.name]
        change = relative_change(heads[(heads["budget"] == middle(tables)) & (heads["queries"] == queries)], candidate, base)
        return None if change.empty else change.groupby("context")["improved"].mean()

    return measure


def total_change(candidate: str = CANDIDATE, base: str = BASE, *, queries: str = "first") -> Measure:
    """Relative change of ΣL over layers and heads."""

    def measure(tables: Tables) -> pd.Series | None:
        return _change(tables, candidate, base, middle(tables), queries)

    return measure


def worst_budget(budgets: Sequence[float], queries: str = "first") -> Measure:
    """The largest of the mean relative changes of ΣL over these budgets, with an interval for it; all of the budget ablation are needed."""

    def measure(tables: Tables) -> Estimate | None:
        pair = (f"{CANDIDATE}:window={NARROW}", f"{BASE}:window={NARROW}")
        changes = [_change(tables, *pair, budget, queries) for budget in budgets]
        known = [change for change in changes if change is not None and len(change)]
        return largest_mean(known) if len(known) == len(budgets) else None

    return measure


def drift_change() -> Measure:
    """Relative change of the hidden state's drift after the last layer, first decoded token."""

    def measure(tables: Tables) -> pd.Series | None:
        change = _drift(tables)
        return None if change is None else change.iloc[:, -1]

    return measure


def drift_growth() -> Measure:
    """The mean relative change of the drift over the last third of the layers, less that over the first third."""

    def measure(tables: Tables) -> pd.Series | None:
        change = _drift(tables)
        if change is None or change.shape[1] < 3:
            return None
        third = change.shape[1] // 3
        return change.iloc[:, -third:].mean(axis=1) - change.iloc[:, :third].mean(axis=1)

    return measure


def alpha_spread(alphas: tuple[float, ...] = (0.25, 0.5, 0.75)) -> Measure:
    """(largest − smallest ΣL over the αs) / ΣL at α = 0.5."""

    def measure(tables: Tables) -> pd.Series | None:
        sums = [_sums(tables, f"{CANDIDATE}:alpha={alpha:g}", middle(tables), "first") for alpha in alphas]
        centre = _sums(tables, f"{CANDIDATE}:alpha=0.5", middle(tables), "first")
        if centre is None or any(one is None for one in sums):
            return None
        wide = pd.concat(sums, axis=1)  # type: ignore[arg-type]
        return (wide.max(axis=1) - wide.min(axis=1)) / centre

    return measure


def difference(one: Measure, other: Measure) -> Measure:
    """One measure less another, context by context."""

    def measure(tables: Tables) -> pd.Series | None:
        first, second = one(tables), other(tables)
        if not isinstance(first, pd.Series) or not isinstance(second, pd.Series):
            return None
        return (first - second).dropna()

    return measure


def single_improved(candidate: str, base: str = "attention") -> Measure:
    """Share of single query heads whose L1 is lower under `candidate`; a tie counts ½."""

    def measure(tables: Tables) -> pd.Series | None:
        wide = _single(tables, "perturbation")
        if wide is None or candidate not in wide:
            return None
        wide = wide[wide[base] > 0]
        lower = (wide[candidate] < wide[base]) + 0.5 * (wide[candidate] == wide[base])
        return lower.groupby("context").mean()

    return measure


def single_median(above: str, below: str, *, choice: str = "attention") -> Measure:
    """Median over single query heads of one column over another, in L1; heads where the one below is 0 count not."""

    def measure(tables: Tables) -> pd.Series | None:
        rows = tables[SINGLE.name]
        rows = rows[(rows["choice"] == choice) & (rows["norm"] == "L1") & (rows[below] > 0)]
        return None if rows.empty else (rows[above] / rows[below]).groupby(rows["context"]).median()

    return measure


def optimum_gap(choice: str, *, column: str = "theta", optimum: str = "least θ", norm: str = "L1") -> Measure:
    """Σ of a column over the heads under `choice`, over that under the optimum (for θ: its certified lower bound), less 1."""

    def measure(tables: Tables) -> pd.Series | None:
        wide = _single(tables, column, norm)
        best = _single(tables, "lower" if column == "theta" else column, norm)
        if wide is None or best is None or optimum not in best or choice not in wide:
            return None
        known = best[optimum].dropna()
        if known.empty:
            return None
        by = known.index.get_level_values("context")
        return wide[choice].loc[known.index].groupby(by).sum() / known.groupby(by).sum() - 1

    return measure


def violations() -> Measure:
    """Queries that break L ≤ θ or a link of L ≤ θ_ô ≤ θ, all contexts together."""

    def measure(tables: Tables) -> Estimate | None:
        rows = [tables[name]["violations"] for name in (HEADS.name, SINGLE.name)]
        if not all(map(len, rows)):
            return None
        count = float(sum(part.sum() for part in rows))
        return Estimate(count, count, count)

    return measure


def rank(estimate: str, judge: Callable[[np.ndarray, np.ndarray], float] | None = None) -> Measure:
    """How an estimate ranks the entries of a layer against their exact KL (Spearman's ρ, or `judge`), mean over the layers."""

    def measure(tables: Tables) -> pd.Series | None:
        rows = tables[ENTRIES.name]
        if rows.empty:
            return None
        score = judge or (lambda truth, guess: float(spearmanr(truth, guess)[0]))
        found = {
            key: score(part["exact"].to_numpy(), part[estimate].to_numpy()) for key, part in rows.groupby(["context", "layer"])
        }
        return pd.Series(found, dtype=float).groupby(level=0).mean()

    return measure


def kl_change(candidate: str, base: str, *, most: float = 1.0, least: float = 0.0) -> Measure:
    """KL of `candidate` over that of `base`, less 1; mean over the budgets in [least, most]."""

    def measure(tables: Tables) -> pd.Series | None:
        change = _kl(tables, candidate, base)
        if change is None:
            return None
        chosen = change[[budget for budget in change if least <= float(str(budget)) <= most]]
        return chosen.mean(axis=1) if chosen.shape[1] else None

    return measure


def window_to_later() -> Measure:
    """ΣL of the later queries over ΣL of the window's, attention-only, less 1."""

    def measure(tables: Tables) -> pd.Series | None:
        later, window = (_sums(tables, BASE, middle(tables), queries) for queries in ("later", "window"))
        return None if later is None or window is None else later / window - 1

    return measure


def behaviour_rank() -> Measure:
    """Spearman's ρ over all policies measured at the middle budget: Σ over layers of the outputs' L1 perturbation against the KL."""

    def measure(tables: Tables) -> pd.Series | None:
        layers, runs, budget = tables[LAYERS.name], tables[RUNS.name], middle(tables)
        layers = layers[(layers["budget"] == budget) & (layers["queries"] == "later") & (layers["norm"] == "L1")]
        lost = layers.groupby(["context", "policy"])["perturbation"].sum()
        kl = runs[(runs["budget"] == budget) & (runs["policy"] != FULL)].set_index(["context", "policy"])["kl"]
        both = pd.concat({"lost": lost, "kl": kl}, axis=1, join="inner")
        # a variant that says what the settings say has the pair's rows under another name: it counts once
        again = both.reset_index()[["context", "lost", "kl"]].duplicated().to_numpy()
        both = both[~again]
        found = {
            context: spearmanr(part["lost"], part["kl"])[0]
            for context, part in both.groupby(level=0)
            if len(part) >= 5 and part["lost"].nunique() > 1 and part["kl"].nunique() > 1
        }
        return pd.Series(found) if found else None

    return measure


def coupling() -> Measure:
    """‖Σ_h Δ_h‖ / Σ_h ‖Δ_h‖ of attention-only selection, first decoded token, L1; mean over the layers."""

    def measure(tables: Tables) -> pd.Series | None:
        layers = tables[LAYERS.name]
        chosen = layers[
            (layers["policy"] == BASE)
            & (layers["budget"] == middle(tables))
            & (layers["queries"] == "first")
            & (layers["norm"] == "L1")
        ].dropna(subset="coupling")
        return None if chosen.empty else chosen.groupby("context")["coupling"].mean()

    return measure


def seconds(candidate: str, base: str, *, what: str) -> Measure:
    """Median seconds of `candidate` over those of `base`, less 1. `what`: first_token_s, token_s, or both (a first token and 32 more)."""

    def measure(tables: Tables) -> pd.Series | None:
        rows = tables[TIMINGS.name]
        if not {candidate, base} <= set(rows["policy"]):
            return None
        value = rows["first_token_s"] + 32 * rows["token_s"] if what == "both" else rows[what]
        found = value.groupby([rows["context"], rows["policy"]]).median().unstack()
        return found[candidate] / found[base] - 1

    return measure


def loss_ratio(bases: Sequence[str], budget: float = LARGE) -> Measure:
    """The score lost to eviction under two-stage selection over that under its base (RULER, one budget), bases together; over samples."""

    def measure(tables: Tables) -> Estimate | None:
        rows = tables[SAMPLES.name]
        rows = rows[(rows["budget"] == budget) & rows["source"].isin(GROUPS["ruler"])]
        keys = ["model", "source", "length", "seed", "sample", "question"]
        rows = rows.assign(lost=rows["full_score"] - rows["score"])
        wide = rows.pivot(index=keys, columns="policy", values="lost")
        known = _pairs(wide, bases)
        # the rows of a sample are one draw
        whole = wide[[name for pair in known for name in pair]].dropna()
        staged, plain = (whole[[pair[place] for pair in known]].sum(axis=1).to_numpy() for place in (0, 1))
        if not known or len(whole) < 2:
            return None
        if mean(plain).low <= 0 or np.isnan(mean(plain).low):  # nothing is lost, or hardly: a ratio to it says nothing
            return Estimate(float(ratio_of_means(staged, plain).value), float("nan"), float("nan"))
        return ratio_of_means(staged, plain)

    return measure


def long_bench() -> Measure:
    """Share of LongBench's cases (task, base, 20 and 40 % cache) that two-stage selection scores better in; ties count not."""

    def measure(tables: Tables) -> Estimate | None:
        rows = tables[SAMPLES.name]
        rows = rows[rows["source"].isin(GROUPS["longbench"]) & rows["budget"].isin([0.2, 0.4])]
        means = rows.groupby(["source", "budget", "policy"])["score"].mean().unstack()
        better = [means[staged] - means[base] for staged, base in _pairs(means, ("snapkv", "adakv", "headkv"))]
        moved = pd.concat(better).dropna() if better else pd.Series(dtype=float)
        moved = moved[moved != 0]
        return proportion(int((moved > 0).sum()), len(moved)) if len(moved) else None

    return measure


def _pairs(wide: pd.DataFrame, bases: Sequence[str]) -> list[tuple[str, str]]:
    """Columns (two-stage, its base) of each base; those of HeadKV may name a file of head scores, both the same."""
    files = dict.fromkeys(str(name).partition(":scores=")[2] for name in wide)
    tails = [f":scores={file}" if file else "" for file in files]
    pairs = [(f"{base}+two-stage{tail}", f"{base}{tail}") for base in bases for tail in tails]
    return [pair for pair in pairs if set(pair) <= set(wide)]


def _heads(tables: Tables, policy: str, budget: float | None, queries: str) -> pd.DataFrame | None:
    heads = tables[HEADS.name]
    chosen = heads[
        (heads["policy"] == policy) & (heads["budget"] == budget) & (heads["queries"] == queries) & (heads["norm"] == "L1")
    ]
    return None if chosen.empty else chosen.set_index(["context", "layer", "head"])


def _sums(tables: Tables, policy: str, budget: float | None, queries: str) -> pd.Series | None:
    rows = _heads(tables, policy, budget, queries)
    return None if rows is None else rows["perturbation"].groupby("context").sum()


def _change(tables: Tables, candidate: str, base: str, budget: float | None, queries: str) -> pd.Series | None:
    one, other = _sums(tables, candidate, budget, queries), _sums(tables, base, budget, queries)
    if one is None or other is None:
        return None
    return (one / other.where(other > 0) - 1).dropna()


def _drift(tables: Tables) -> pd.DataFrame | None:
    """Relative change of the drift, a row per context, a column per layer."""
    layers = tables[LAYERS.name]
    rows = layers[(layers["queries"] == "first") & (layers["norm"] == "L1") & (layers["budget"] == middle(tables))]
    wide = rows[rows["policy"].isin([BASE, CANDIDATE])].pivot(index=["context", "layer"], columns="policy", values="drift")
    if not {BASE, CANDIDATE} <= set(wide):
        return None
    change = (wide[CANDIDATE] / wide[BASE].where(wide[BASE] > 0) - 1).unstack("layer")
    return change if change.notna().any(axis=None) else None


def _single(tables: Tables, column: str, norm: str = "L1") -> pd.DataFrame | None:
    rows = tables[SINGLE.name]
    rows = rows[rows["norm"] == norm]
    return None if rows.empty else rows.pivot(index=["context", "layer", "head"], columns="choice", values=column)


def _kl(tables: Tables, candidate: str, base: str) -> pd.DataFrame | None:
    """Relative change of the KL, a row per context, a column per budget below 1."""
    runs = tables[RUNS.name]
    wide = runs[runs["budget"] < 1].pivot(index=["context", "budget"], columns="policy", values="kl")
    if not {candidate, base} <= set(wide):
        return None
    change = (wide[candidate] / wide[base].where(wide[base] > 0) - 1).dropna().unstack("budget")
    return None if change.empty else change
