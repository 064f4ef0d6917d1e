"""Budgets from a joint ranking: over the heads of a layer (AdaKV), or over the whole model."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from eviction.allocate.base import Candidates, apportion
from eviction.checks import one_of, share
from perturbation.curve import ranking


@dataclass(frozen=True)
class AdaKV:
    """The layer's budget goes to its heads by one ranking of all their entries, with a floor for each head.

    Source: AdaKV (arXiv 2407.11550). Two floors are in use. "forced": each head's top φ (b − w) entries are taken first, the
    rest by rank. "mix": the joint ranking gives counts c_h, and a head gets (1 − φ) c_h + φ (b − w), in whole numbers that add up.

    Attributes:
        floor: φ, in [0, 1]; 1 is uniform.
        rule: which floor.
    """

    floor: float = 0.2
    rule: Literal["forced", "mix"] = "mix"

    scope: ClassVar[Literal["layer", "model"]] = "layer"
    source: ClassVar[str] = "AdaKV, arXiv 2407.11550"

    def __post_init__(self) -> None:
        share("floor", self.floor)
        one_of("rule", self.rule, "forced", "mix")

    def __call__(self, layers: list[Candidates]) -> list[Int[Tensor, "batch kv_heads"]]:
        """Counts of one layer."""
        return _joint(layers, self.floor, self.rule)


@dataclass(frozen=True)
class Global:
    """One ranking of all entries of all heads of all layers, with a floor for each head: scores must mean the same everywhere.

    Source: Layer-DefensiveKV (arXiv 2510.13334) ranks over all layers so.

    Attributes:
        floor: the share of the uniform budget that each head's own top entries are sure of.
    """

    floor: float = 0.2

    scope: ClassVar[Literal["layer", "model"]] = "model"
    source: ClassVar[str] = "DefensiveKV, arXiv 2510.13334"

    def __post_init__(self) -> None:
        share("floor", self.floor)

    def __call__(self, layers: list[Candidates]) -> list[Int[Tensor, "batch kv_heads"]]:
        """Counts of every layer."""
        return _joint(layers, self.floor, "forced")


def _joint(layers: list[Candidates], floor: float, rule: str) -> list[Tensor]:
    counts = [torch.zeros(layer.scores.shape[:2], dtype=torch.long, device=layer.scores.device) for layer in layers]
    for row in range(layers[0].scores.shape[0]):
        scores: list[Tensor] = []
        sure: list[Tensor] = []
        owner: list[Tensor] = []
        rooms: list[int] = []  # of every head
        leasts: list[int] = []
        mosts: list[int] = []
        for layer in layers:
            free = layer.free[row].expand(layer.n_kv_heads, -1)
            for head, (room, held) in enumerate(zip(layer.room[row].tolist(), layer.held[row].tolist(), strict=True)):
                own = layer.scores[row, head][free[head]]
                least = min(int(held == 0), room, len(own))  # no head is left with nothing
                forced = max(int(floor * min(room, len(own)) + 1e-9), least) if rule == "forced" else 0
                scores.append(own)
                sure.append(torch.zeros_like(own, dtype=torch.bool).scatter_(-1, ranking(own)[:forced], True))
                owner.append(torch.full_like(own, len(rooms), dtype=torch.long))
                rooms.append(room)
                leasts.append(least)
                mosts.append(len(own))
        order = ranking(torch.cat(scores), torch.cat(sure))[: sum(rooms)]
        chosen = torch.cat(owner)[order].bincount(minlength=len(rooms)).tolist()
        if rule == "mix":
            shares = [(1 - floor) * count + floor * room for count, room in zip(chosen, rooms, strict=True)]
            chosen = apportion(shares, sum(rooms), leasts, mosts)
        start = 0
        for layer, count in zip(layers, counts, strict=True):
            stop = start + layer.n_kv_heads
            count[row] = torch.tensor(chosen[start:stop], device=count.device) + layer.held[row]
            start = stop
    return counts
