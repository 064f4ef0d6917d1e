"""From rows to the few numbers that a terminal and the report's first table show. DataFrame in, DataFrame out."""

import numpy as np
import pandas as pd

BASE, CANDIDATE = "snapkv", "snapkv+two-stage"


def relative_change(heads: pd.DataFrame, *, norm: str = "L1") -> pd.DataFrame:
    """(L of two-stage − L of attention-only) / L of attention-only, for every context, layer, head, budget and query set.

    Columns `context, layer, head, budget, queries, change, improved`; `improved` is 1 where L is lower,
    ½ where it is the same, else 0. Heads that attention-only does not perturb at all are
    left out, since nothing is relative to 0.
    """
    keys = ["context", "layer", "head", "budget", "queries"]
    chosen = heads[heads["norm"] == norm]
    wide = chosen.pivot(index=keys, columns="policy", values="perturbation")
    wide = wide[wide[BASE] > 0]
    change = (wide[CANDIDATE] - wide[BASE]) / wide[BASE]
    return pd.DataFrame({"change": change, "improved": (1 - np.sign(change)) / 2}).reset_index()


def perturbation_summary(heads: pd.DataFrame, *, norm: str = "L1") -> pd.DataFrame:
    """A row per query set and budget.

    `improved`: share of heads whose mean L is lower under two-stage, a tie counting ½. `mean_change`, `median_change`: of the relative change
    per head. `total_change`: relative change of ΣL over the heads. `sigma_share`: share of queries with σ > ½ under
    two-stage, all kept entries counted; `stage1_share`: the same after stage 1 alone. `tightness`: median over heads of
    mean θ / mean L under two-stage.
    """
    change = relative_change(heads, norm=norm).groupby(["queries", "budget"], sort=True)
    chosen = heads[heads["norm"] == norm]
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
    evicted = runs[runs["policy"] != "full"]
    evicted = evicted.assign(bytes_share=evicted["bytes"] / evicted["context"].map(full))
    return evicted.groupby(["budget", "policy"])[["kl", "agreement", "bytes_share"]].mean().reset_index()


def violations(heads: pd.DataFrame) -> int:
    """Queries, over all rows, whose exact L exceeds θ."""
    return int(heads["violations"].sum())
