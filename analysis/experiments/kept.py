"""Policies that divide a budget over heads or layers, judged by behaviour, and what each policy kept."""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from eviction import EvictedCache, Policy
from eviction.errors import BudgetError
from eviction.looked import Looked
from hooks.errors import UnsupportedAttention

Keep = tuple[Tensor | None, ...]
Ran = Callable[[str, float, EvictedCache], None]


def every_choice(
    looked: Looked, policies: Mapping[str, Policy], budgets: Sequence[float], shown: float, ran: Ran
) -> tuple[dict[str, Keep], dict[str, str]]:
    """Each policy at each budget: `ran` is handed the compressed cache. What each keeps at the budget `shown`, and why some cannot choose."""
    masks, refused = {}, {}
    for name, policy in policies.items():
        try:
            for budget in budgets:
                keep = looked.decide(policy, budget)
                ran(name, budget, looked.evicted(keep))
                if budget == shown:
                    masks[name] = keep
        except (UnsupportedAttention, BudgetError) as error:
            refused[name] = str(error)
        looked.forget()
    return masks, refused


def allocation_rows(policy: str, budget: float, keep: Keep) -> pd.DataFrame:
    """How many entries each KV head of each layer keeps."""
    rows = [
        {"policy": policy, "budget": budget, "layer": layer, "kv_head": head, "kept": int(count), "tokens": mask.shape[-1]}
        for layer, mask in enumerate(keep)
        if mask is not None
        for head, count in enumerate(mask[0].sum(-1).tolist())
    ]
    return pd.DataFrame(rows)


def kept_rows(policy: str, budget: float, keep: Keep, pieces: Sequence[str]) -> pd.DataFrame:
    """For each token of the prompt the share of all KV heads that keep its entry; `pieces` are the tokens' texts."""
    heads = torch.cat([mask[0] for mask in keep if mask is not None])
    return pd.DataFrame(
        {
            "policy": policy,
            "budget": budget,
            "position": range(heads.shape[-1]),
            "token": list(pieces),
            "share": heads.double().mean(0).cpu().numpy(),
        }
    )
