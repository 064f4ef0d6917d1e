"""A decision is a value: which entries stay, and which of them the first stage chose."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True)
class Decision:
    """Entries kept, per batch row and KV head.

    `keep` [batch, kv_heads, keys] holds the protected entries and everything selected. `stage1`, where the selection has
    stages, holds what was certain before stage 2 began: the first stage's choice and the protected entries.
    """

    keep: Bool[Tensor, "batch kv_heads keys"]
    stage1: Bool[Tensor, "batch kv_heads keys"] | None = None


def with_protected(chosen: Bool[Tensor, "batch kv_heads candidates"], protected: int) -> Bool[Tensor, "batch kv_heads keys"]:
    """The mask over all keys: the candidates as chosen, then the `protected` entries of the window, all kept."""
    return torch.cat([chosen, chosen.new_ones(*chosen.shape[:2], protected)], dim=-1)
