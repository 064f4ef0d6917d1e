"""H2O: an entry matters as much as all queries so far looked at it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eviction.checks import whole
from eviction.observation import Observation
from perturbation.weights import attention_weights

BLOCK = 256
"""Queries whose attention exists at a time."""


@dataclass(frozen=True)
class H2O:
    """Σ_t A_{h,t,i} over every query of the prompt: the heavy hitters, beside the `recent` last entries.

    Early entries were seen by more queries and so have the larger sums, as in the paper. Source: H2O (arXiv 2306.14048), which splits
    the budget in halves for recent and heavy entries; here the recent part is a number of entries. Where a cache is evicted from again, what
    earlier queries gave an entry stays with it, as in the paper.

    Attributes:
        recent: entries at the end that are always kept.
    """

    recent: int = 32

    source: ClassVar[str] = "H2O, arXiv 2306.14048"
    adds_up: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("recent", self.recent, 0)

    @property
    def queries(self) -> None:
        """All."""
        return

    @property
    def ends(self) -> tuple[int, int]:
        """The recent entries are kept."""
        return 0, self.recent

    def __call__(self, seen: Observation, protected: Bool[Tensor, "batch _ keys"]) -> Float[Tensor, "batch heads keys"]:
        """Sums over the recorded queries, a block of them at a time."""
        record, total = seen.record, seen.carried
        for start in range(0, record.n_queries, BLOCK):
            part = slice(start, start + BLOCK)
            sinks = record.sinks
            inputs = {
                **record.inputs,
                "queries": record.queries[:, :, part],
                "mask": record.mask[:, :, part],
                "sinks": sinks[:, :, part] if sinks is not None and sinks.dim() == 3 else sinks,
            }
            weights, _ = attention_weights(**inputs)
            looked = (weights * record.query_valid[:, None, part, None]).sum(2)
            total = looked if total is None else total + looked
        return torch.as_tensor(total)
