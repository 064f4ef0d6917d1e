"""Expected Attention: what queries distributed like the last ones are expected to look at."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eviction.checks import whole
from eviction.observation import Observation


@dataclass(frozen=True)
class ExpectedAttention:
    """softmax_i(s μ_h·k_i + ½ s² k_iᵀ Σ_h k_i), μ and Σ the mean and covariance of the last `window` queries, s the scale.

    For normally distributed q it is E[exp(s q·k)], normalised. Source: Expected Attention (arXiv 2510.00636), which takes the statistics
    before the rotary embedding and averages the rotation over positions to come; here they are those of the queries as attention
    used them, so that any positional scheme will do. Heads with a soft-cap are treated as if they had none.

    Attributes:
        window: queries that the statistics are of.
        sink: entries at the start that are always kept.
        recent: entries at the end that are always kept.
    """

    window: int = 128
    sink: int = 4
    recent: int = 0

    source: ClassVar[str] = "Expected Attention, arXiv 2510.00636"

    def __post_init__(self) -> None:
        whole("window", self.window, 1)
        whole("sink", self.sink, 0)
        whole("recent", self.recent, 0)

    @property
    def queries(self) -> int:
        """The window's."""
        return self.window

    @property
    def ends(self) -> tuple[int, int]:
        """The sink and the recent entries are kept."""
        return self.sink, self.recent

    def __call__(self, seen: Observation, protected: Bool[Tensor, "batch _ keys"]) -> Float[Tensor, "batch heads keys"]:
        """Probabilities over the valid entries."""
        record = seen.record
        dtype = torch.promote_types(torch.float32, record.queries.dtype)
        queries = record.queries[:, :, -self.window :].to(dtype)
        looking = seen.looking[:, :, -self.window :].to(dtype)
        count = looking.sum(2, keepdim=True).clamp(min=1)  # a row without any token has none
        mean = (queries * looking).sum(2, keepdim=True) / count
        apart = (queries - mean) * looking
        keys = record.keys.to(dtype).repeat_interleave(record.group, 1)
        along = (mean @ keys.mT).squeeze(2) * record.scale
        spread = ((keys @ apart.mT) * record.scale).square().sum(-1) / count[:, :, 0]  # s² kᵀ Σ k
        logits = (along + spread / 2).masked_fill(~seen.per_head(seen.valid), -torch.inf)
        return logits.softmax(-1).nan_to_num(0)  # a row without any token
