"""Small tables with known answers."""

import itertools

import pandas as pd

from analysis.schema import FULL, SAMPLES

BUDGETS = (0.1, 0.2)


def heads() -> pd.DataFrame:
    """Two contexts, two layers, two heads; two-stage halves the perturbation of head 0 and adds a quarter to head 1's."""
    rows = []
    for context, layer, head, policy, budget, queries, norm in itertools.product(
        ("a", "b"), (0, 1), (0, 1), ("snapkv", "snapkv+two-stage"), BUDGETS, ("window", "first", "later"), ("L1", "L2")
    ):
        staged = policy != "snapkv"
        factor = (0.5, 1.25)[head] if staged else 1.0
        truth = (1 + layer) * factor * (2 if norm == "L1" else 1)
        rows.append(
            {
                "context": context,
                "layer": layer,
                "head": head,
                "kv_head": 0,
                "policy": policy,
                "budget": budget,
                "queries": queries,
                "norm": norm,
                "perturbation": truth,
                "theta": 4 * truth,
                "retained_mass": 0.8,
                "retained_share": 1.0 if budget == 0.2 else 0.75,
                "stage1_mass": 0.6 if staged else None,
                "stage1_share": 0.5 if staged else None,
                "violations": 0,
            }
        )
    return pd.DataFrame(rows).astype({"stage1_mass": float, "stage1_share": float})


def layers() -> pd.DataFrame:
    wide = heads().groupby(["context", "layer", "policy", "budget", "queries", "norm"])["perturbation"].sum().reset_index()
    wide["coupling"] = 0.4
    wide["drift"] = (0.01 * (1 + wide["layer"])).where(wide["queries"] != "window")
    return wide


def runs() -> pd.DataFrame:
    rows = []
    for context in ("a", "b"):
        rows.append((context, "full", 1.0, 100, 0.0, 1.0, 100, 1000))
        for policy, budget in itertools.product(("snapkv", "snapkv+two-stage"), BUDGETS):
            kl = (0.2 if policy == "snapkv" else 0.1) + (context == "b")
            rows.append((context, policy, budget, 100, kl, 0.9, int(100 * budget), int(1000 * budget)))
    columns = ["context", "policy", "budget", "tokens", "kl", "agreement", "entries_kept", "bytes"]
    return pd.DataFrame(rows, columns=columns)


def samples(score, *, perturbation=None):
    """A made-up table: two policies at two budgets, ten samples, whose score is `score(policy, budget, sample)`."""
    made = []
    for sample in range(10):
        for policy, budget in ((FULL, 1.0), ("snapkv", 0.2), ("snapkv", 0.4), ("fisher", 0.2), ("fisher", 0.4)):
            value, whole = score(policy, budget, sample), score(FULL, 1.0, sample)
            lost = 0.0 if policy == FULL else perturbation(policy, budget, sample) if perturbation else 1.0
            made.append(
                {
                    "model": "m", "source": "vt", "task": "vt", "length": 100, "seed": 0, "sample": sample, "question": "unseen",
                    "policy": policy, "budget": budget, "depth": None, "tokens": 90, "prediction": "", "answer": "a",
                    "score": value, "full_score": whole, "flipped": int(whole >= 0.5 > value), "kl": lost, "agreement": 1 - lost / 10,
                    "log_likelihood": -1.0, "judged_tokens": 4, "perturbation": lost, "theta": 4 * lost, "retained_mass": 1.0,
                    "retained_share": 1.0, "relative_perturbation": lost, "entries_kept": 20.0, "bytes": int(100 * budget),
                    "full_bytes": 100, "cell": f"{policy}{budget}{sample}",
                }
            )  # fmt: skip
    return SAMPLES.checked(pd.DataFrame(made).astype({"depth": float}))
