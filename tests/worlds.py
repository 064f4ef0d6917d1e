"""Made-up runs: one in which every claim holds, and one in which none does. Small tables of the declared form."""

import itertools

import numpy as np
import pandas as pd

from analysis.ablations import ABLATIONS, BASE, CANDIDATE, IN_ONE_RUN
from analysis.schema import ALLOCATION, ENTRIES, HEADS, KEPT, LAYERS, RUNS, SAMPLES, SINGLE, TIMINGS

CONTEXTS = ("a", "b", "c")
N_LAYERS, N_HEADS = 6, 4
BUDGETS = (0.1, 0.2, 0.4)
ABOUT = {
    "model": {"name": "made up", "note": ""},
    "settings": {"window": 32, "pooling": "max", "kernel": 7, "alpha": 0.5, "epsilon": 1e-4, "later": 8, "context_length": 100, "seed": 0,
                 "device": "cpu", "dtype": "float32"},
    "contexts": list(CONTEXTS),
    "provenance": {"command": "made by hand", "versions": {"python": "3"}, "machine": "none", "threads": 1, "cpus": 1, "gpus": []},
    "selfcheck": {"attention": 0.0, "projection": 0.0, "evict_nothing": 0.0, "tolerance": 1e-6},
    "refused": {},
}  # fmt: skip


def world(good: bool) -> dict[str, pd.DataFrame]:
    """All tables of a run, and answers to tasks."""
    return {
        "heads": heads(good),
        "layers": layers(good),
        "runs": runs(good),
        "single": single(good),
        "entries": entries(good),
        "allocation": allocation(),
        "kept": kept(),
        "timings": timings(good),
        "samples": samples(good),
    }


def policies() -> list[tuple[str, float]]:
    """The pair at every budget, and the variants of the ablations."""
    asked = [(name, budget) for name in (BASE, CANDIDATE) for budget in BUDGETS]
    for name in IN_ONE_RUN:
        ablation = ABLATIONS[name]
        asked += [(text, budget) for text in ablation.variants.values() for budget in ablation.budgets or (0.2,)]
    return list(dict.fromkeys(asked))


def factor(policy: str, good: bool) -> float:
    """L of a policy over that of attention-only."""
    if policy.startswith(BASE) and not policy.startswith((CANDIDATE, "snapkv+")):
        return 1.0
    if policy == f"{CANDIDATE}:alpha=0":
        return 0.9 if good else 1.1
    if policy == f"{CANDIDATE}:alpha=0.25":
        return 0.8 if good else 1.6
    if policy == f"{CANDIDATE}:norm=1":
        return 0.8
    return 0.8 if good else 1.25


def told(good: bool, budget: float, norm: str, policy: str) -> bool:
    """Whether rows speak for the claims: at other budgets than 20 % and in L2 they say the opposite, so that who reads those is found out."""
    return good is (norm == "L1" and (budget == 0.2 or policy not in (BASE, CANDIDATE)))


def heads(good: bool) -> pd.DataFrame:
    rows = []
    for (number, context), layer, head, (policy, budget), queries, norm in itertools.product(
        enumerate(CONTEXTS), range(N_LAYERS), range(N_HEADS), policies(), ("window", "first", "later"), ("L1", "L2")
    ):
        staged, so = policy.startswith(CANDIDATE), told(good, budget, norm, policy)
        truth = (1 + layer + 0.1 * head) * factor(policy, so) * (1 + 0.01 * number) / budget
        truth *= 3 if queries == "later" and not so else 1
        rows.append((context, layer, head, head // 2, policy, budget, queries, norm, truth, 4 * truth, 0.9, 1.0 if so else 0.6,
                     0.8 if staged else None, (1.0 if so else 0.6) if staged else None, 0 if good else 1))  # fmt: skip
    return HEADS.checked(pd.DataFrame(rows, columns=HEADS.arrow.names).astype({"stage1_mass": float, "stage1_share": float}))


def layers(good: bool) -> pd.DataFrame:
    by = ["context", "layer", "policy", "budget", "queries", "norm"]
    wide = heads(good).groupby(by)["perturbation"].sum().reset_index()
    so = [
        told(good, budget, norm, policy) is (queries == "first")
        for budget, norm, policy, queries in wide[["budget", "norm", "policy", "queries"]].itertuples(index=False)
    ]
    wide["coupling"] = np.where(so, 0.4, 0.9)
    # the first layers say the opposite of the last
    gain = np.where(so, 1.1 - 0.05 * wide["layer"], 0.9 + 0.05 * wide["layer"])
    drift = 0.1 * np.where(wide["policy"] == CANDIDATE, gain, 1.0)
    wide["drift"] = pd.Series(drift).where(wide["queries"] != "window")
    return LAYERS.checked(wide)


def runs(good: bool) -> pd.DataFrame:
    rows = []
    for context in CONTEXTS:
        rows.append((context, "full", 1.0, 100, 0.0, 1.0, 100, 1000))
        for number, (policy, budget) in enumerate(policies()):
            lost = factor(policy, good) / budget * (1 + 1e-6 * number)  # no two policies are one choice in other words
            rows.append(
                (context, policy, budget, 100, lost if good else 1 / lost, 0.9, round(100 * budget), round(1000 * budget))
            )
        for budget in BUDGETS:
            base, staged = ((factor(name, good) / budget) ** (1 if good else -1) for name in (BASE, CANDIDATE))
            share = {0.1: 0.5, 0.2: 0.6, 0.4: 0.7} if good else {0.1: 2.0, 0.2: 1.5, 0.4: 1.2}
            rows.append((context, "fisher", budget, 100, base * share[budget], 0.9, round(100 * budget), round(1000 * budget)))
            assert (base * share[budget] < staged) is good
    return RUNS.checked(pd.DataFrame(rows, columns=RUNS.arrow.names))


def single(good: bool) -> pd.DataFrame:
    choices = ("attention", "norm", "two-stage", "two-stage, ε = 0", "centred", "ratio", "least θ", "least L found")
    rows = []
    for context, layer, head, choice, norm in itertools.product(
        CONTEXTS, range(N_LAYERS), range(N_HEADS), choices, ("L1", "L2")
    ):
        so = good is (norm == "L1")  # L2 says the opposite, but of the least L, which is searched for in L2
        known = {"attention": 1.0, "least L found": 0.5 if so else 0.95}
        found = known.get(choice, 0.7 if so else 1.2) * (1 + layer)
        theta = (1.5 if so else 5) * found
        lower = (theta / 1.01 if good else theta / 2) if choice == "least θ" and norm == "L1" else None
        rows.append((context, layer, head, choice, 0.2, norm, found, theta, (0.72 if so else 0.9) * theta, 0.9, lower, 0))
    return SINGLE.checked(pd.DataFrame(rows, columns=SINGLE.arrow.names).astype({"lower": float}))


def entries(good: bool) -> pd.DataFrame:
    random = np.random.default_rng(0)
    parts = []
    for context, layer in itertools.product(CONTEXTS, range(2)):
        exact = 10 ** random.uniform(-10, -2, 80)
        noise = {name: 10 ** random.normal(0, size, 80) for name, size in (("little", 0.002), ("some", 1.0), ("much", 4.0))}
        order = ("little", "some", "much") if good else ("much", "little", "little")
        fisher, rival, attention = (exact * noise[size] for size in order)
        parts.append(
            pd.DataFrame(
                {
                    "context": context, "layer": layer, "kv_head": np.repeat([0, 1], 40), "entry": np.tile(range(40), 2), "exact": exact,
                    "fisher": fisher, "straight_through": rival if good else exact * noise["much"], "straight_through_layer": rival,
                    "attention": attention, "value_norm": attention, "single_eviction": rival,
                }
            )
        )  # fmt: skip
    return ENTRIES.checked(pd.concat(parts, ignore_index=True))


def allocation() -> pd.DataFrame:
    rows = [
        (context, policy, 0.2, layer, head, 10 * (1 + layer + head), 100)
        for context, policy, layer, head in itertools.product(
            CONTEXTS, ("adakv+two-stage", "fisher"), range(N_LAYERS), range(2)
        )
    ]
    return ALLOCATION.checked(pd.DataFrame(rows, columns=ALLOCATION.arrow.names))


def kept() -> pd.DataFrame:
    rows = [
        (context, policy, 0.2, place, f" word{place}" if place % 5 else "\n$x$ <", (place % 11) / 10)
        for context, policy, place in itertools.product(CONTEXTS, (BASE, CANDIDATE, "fisher"), range(100))
    ]
    return KEPT.checked(pd.DataFrame(rows, columns=KEPT.arrow.names))


def timings(good: bool) -> pd.DataFrame:
    first = {"full": 1.0, BASE: 1.1, CANDIDATE: 1.11 if good else 1.5, "fisher": 1.4 if good else 0.9}
    each = {"full": 0.1, BASE: 0.05, CANDIDATE: 0.05 if good else 0.2, "fisher": 0.05 if good else 0.2}
    rows = [
        (context, policy, 1.0 if policy == "full" else 0.2, turn, first[policy] * (1 + 0.001 * turn), each[policy])
        for context, policy, turn in itertools.product(CONTEXTS, first, range(1, 4))
    ]
    return TIMINGS.checked(pd.DataFrame(rows, columns=TIMINGS.arrow.names))


def samples(good: bool) -> pd.DataFrame:
    rows = []
    names = ("full", *(f"{base}{staged}" for base in ("snapkv", "adakv", "headkv") for staged in ("", "+two-stage")))
    names = tuple(f"{name}:scores=some/where.json" if name.startswith("headkv") else name for name in names)
    for source, number, policy, budget in itertools.product(("vt", "qasper", "hotpotqa"), range(8), names, (0.2, 0.4)):
        lost = 0.0 if policy == "full" else 0.1 if ("two-stage" in policy) is good else 0.6
        score = 0.9 - lost * (1 + 0.01 * number)
        rows.append(
            {
                **dict.fromkeys(SAMPLES.arrow.names, 0),
                "model": "made up", "source": source, "task": source, "length": 100, "sample": number, "question": "unseen",
                "policy": policy, "budget": 1.0 if policy == "full" else budget, "prediction": "", "answer": "a", "score": score,
                "full_score": 0.9, "cell": f"{source}{number}{policy}{budget}",
            }
        )  # fmt: skip
    frame = pd.DataFrame(rows).drop_duplicates(SAMPLES.keys)
    floats = {field.name: "float64" for field in SAMPLES.arrow if str(field.type) == "double"}
    return SAMPLES.checked(frame.astype(floats))
