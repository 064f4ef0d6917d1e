"""From rows to the few numbers that a terminal and the report's first table show. DataFrame in, DataFrame out."""

import numpy as np
import pandas as pd

from analysis.ablations import BASE, CANDIDATE, Ablation
from analysis.schema import POLICIES


def relative_change(heads: pd.DataFrame, candidate: str = CANDIDATE, base: str = BASE, *, norm: str = "L1") -> pd.DataFrame:
    """(L of the candidate − L of the base) / L of the base, for every context, layer, head, budget and query set that both have.

    Columns `context, layer, head, budget, queries, change, improved`; `improved` is 1 where L is lower,
    ½ where it is the same, else 0. Heads that the base does not perturb at all are left out, since nothing is
    relative to 0.
    """
    keys = ["context", "layer", "head", "budget", "queries"]
    chosen = heads[(heads["norm"] == norm) & heads["policy"].isin([candidate, base])]
    wide = chosen.pivot(index=keys, columns="policy", values="perturbation").reindex(columns=[candidate, base]).dropna()
    wide = wide[wide[base] > 0]
    change = (wide[candidate] - wide[base]) / wide[base]
    return pd.DataFrame({"change": change, "improved": (1 - np.sign(change)) / 2}).reset_index()


def perturbation_summary(heads: pd.DataFrame, *, norm: str = "L1") -> pd.DataFrame:
    """A row per query set and budget.

    `improved`: share of heads whose mean L is lower under two-stage, a tie counting ½. `mean_change`, `median_change`: of the relative change
    per head. `total_change`: relative change of ΣL over the heads. `sigma_share`: share of queries with σ > ½ under
    two-stage, all kept entries counted; `stage1_share`: the same after stage 1 alone. `tightness`: median over heads of
    mean θ / mean L under two-stage.
    """
    change = relative_change(heads, norm=norm).groupby(["queries", "budget"], sort=True)
    chosen = heads[(heads["norm"] == norm) & heads["policy"].isin([CANDIDATE, BASE])]
    two_stage = chosen[chosen["policy"] == CANDIDATE]
    moved = two_stage[two_stage["perturbation"] > 0]
    sums = chosen.groupby(["queries", "budget", "policy"])["perturbation"].sum().unstack()
    shares = two_stage.groupby(["queries", "budget"])[["retained_share", "stage1_share"]].mean()
    table = pd.DataFrame(
        {
            "improved": change["improved"].mean(),
            "mean_change": change["change"].mean(),
            "median_change": change["change"].median(),
            "total_change": sums[CANDIDATE] / sums[BASE] - 1,
            "sigma_share": shares["retained_share"],
            "stage1_share": shares["stage1_share"],
            "tightness": (moved["theta"] / moved["perturbation"]).groupby([moved["queries"], moved["budget"]]).median(),
        }
    )
    return table.rename_axis(["queries", "budget"]).reset_index()


def behaviour_summary(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per budget and policy: mean KL in nats, top-1 agreement, and the cache's bytes as a share of the full cache's."""
    full = runs[runs["policy"] == "full"].set_index("context")["bytes"]
    evicted = runs[runs["policy"].isin(POLICIES)]
    evicted = evicted.assign(bytes_share=evicted["bytes"] / evicted["context"].map(full))
    return evicted.groupby(["budget", "policy"])[["kl", "agreement", "bytes_share"]].mean().reset_index()


def violations(heads: pd.DataFrame) -> int:
    """Queries, over all rows, whose exact L exceeds θ."""
    return int(heads["violations"].sum())


def variant_change(heads: pd.DataFrame, asked: Ablation, *, norm: str = "L1") -> pd.DataFrame:
    """Each variant of an ablation against its first, a row per context, query set and budget at which there are all that were measured.

    Columns `variant` (its label), `policy`, `context`, `queries`, `budget`, `total_change` (of ΣL over layers and heads), `improved` (share of
    heads with lower L, a tie counting ½).
    """
    base, *others = asked.variants.items()
    chosen = heads[heads["norm"] == norm]
    by = ["context", "queries", "budget"]
    sums = chosen.groupby([*by, "policy"])["perturbation"].sum().unstack()
    parts = []
    for label, policy in others:
        if not {policy, base[1]} <= set(sums):
            continue
        total = sums[policy] / sums[base[1]].where(sums[base[1]] > 0) - 1
        won = relative_change(chosen, policy, base[1], norm=norm).groupby(by)["improved"].mean()
        both = pd.DataFrame({"total_change": total, "improved": won}).dropna().reset_index()
        parts.append(both.assign(variant=label, policy=policy))
    columns = ["variant", "policy", *by, "total_change", "improved"]
    if not parts:
        return pd.DataFrame(columns=columns)
    found = pd.concat(parts, ignore_index=True)[columns]
    variants = found.groupby("budget")["variant"].nunique()
    return found[found["budget"].isin(variants[variants == variants.max()].index)].reset_index(drop=True)
