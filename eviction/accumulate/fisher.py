"""Fisher: an entry matters as much as the next-token distribution would change without it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eviction.accumulate.near import nearby
from eviction.checks import odd, share, whole
from eviction.observation import Observation

ELEMENTS = 1 << 24
"""Numbers of signs, queries, heads and entries that exist at a time."""


@dataclass(frozen=True)
class Fisher:
    """½ E_ε[(Σ_{h in k} A_{h,i} / (1 − A_{h,i}) · g_h·(o_h − v_i))²], the KL of removing entry i of KV head k to second order, in nats.

    A/(1 − A)·(o − v) is what the removal does to a head's output, g the gradient of Σ_y √p_y ε_y log p_y with respect to it, for `signs` draws
    of random signs ε over the vocabulary (`eviction.replay`); the mean over the window's queries. In every layer and head the unit is
    the same, so one ranking over the model is an allocation. Ours; arXiv 2610.06479 asks for the same KL.

    Attributes:
        window: how many of the last queries look, and how many entries are always kept.
        signs: draws of signs.
        dilation: an entry scores at least this times the highest within `kernel` places; 0 dilates nothing.
        kernel: an odd number of places.
        seed: of the signs.
        sink: entries at the start that are always kept.
    """

    window: int = 32
    signs: int = 8
    dilation: float = 0.1
    kernel: int = 7
    seed: int = 0
    sink: int = 4

    source: ClassVar[str] = "ours; the KL that arXiv 2610.06479 asks for"

    def __post_init__(self) -> None:
        whole("window", self.window, 1)
        whole("signs", self.signs, 1)
        share("dilation", self.dilation)
        odd("kernel", self.kernel)
        whole("seed", self.seed, 0)
        whole("sink", self.sink, 0)

    @property
    def queries(self) -> int:
        """The window's."""
        return self.window

    @property
    def ends(self) -> tuple[int, int]:
        """The sink and the window are kept."""
        return self.sink, self.window

    def __call__(self, seen: Observation, protected: Bool[Tensor, "batch _ keys"]) -> Float[Tensor, "batch heads keys"]:
        """Nats; the same for all heads of a cached KV head.

        Raises:
            ValueError: the observation has no gradients: they are made where a model runs (`prefill`, `evicting`), not from a record alone.
        """
        nats = removal_nats(seen)
        scored = (nats * (seen.valid & ~protected)).repeat_interleave(seen.record.n_heads // seen.n_kv_heads, 1)
        if not self.dilation or self.kernel == 1:
            return scored
        return torch.maximum(scored, self.dilation * nearby(scored, seen, self.kernel, "max"))


def removal_nats(seen: Observation) -> Float[Tensor, "batch kv_heads keys"]:
    """½ mean over queries and draws of (Σ_h A/(1 − A) g·(o − v))², of each cached KV head's entries."""
    gradients, record = seen.gradients, seen.record
    if gradients is None:
        raise ValueError(
            "this policy needs the gradients of the model that runs: use it with prefill, generate or evicting, not on a record alone"
        )
    weights = seen.weights
    values = record.values.to(weights.dtype).repeat_interleave(record.group, 1)
    tiny = torch.finfo(weights.dtype).eps
    odds = weights / (1 - weights).clamp(min=tiny)
    outputs = weights @ values
    total = torch.zeros(values.shape[0], seen.n_kv_heads, record.n_keys, device=values.device, dtype=weights.dtype)
    draws, queries = gradients.shape[0], record.n_queries
    block = max(ELEMENTS // max(draws * odds[:, :, 0].numel(), 1), 1)
    for start in range(0, queries, block):
        part = slice(start, start + block)
        asked = gradients[:, :, part].to(weights.dtype).transpose(2, 3)  # [signs, batch, heads, queries, value_dim]
        along = (asked * outputs[:, :, part]).sum(-1, keepdim=True) - asked @ values.mT
        change = (along * odds[:, :, part]).unflatten(2, (seen.n_kv_heads, -1)).sum(3)
        total += ((change.square().mean(0)) * seen.looking[:, :, part]).sum(2)
    return total / 2 / seen.looking.sum(2).clamp(min=1)
