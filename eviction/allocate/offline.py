"""Budgets that are known before the prompt: by layer (PyramidKV), by head (HeadKV)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from eviction.allocate.base import Candidates, apportion
from eviction.checks import at_least


@dataclass(frozen=True)
class PyramidKV:
    """Layer budgets that fall linearly from the bottom to the top, around the uniform one.

    With b' = b − w free entries: the top layer gets b' / β, the bottom one 2 b' − b' / β, in between a line. Heads of a layer that hold
    as much get the same; where an earlier eviction left each its own entries, each goes by its own b'.
    Source: PyramidKV (arXiv 2406.02069).

    Attributes:
        beta: β, at least 1; 1 is uniform. The larger, the steeper.
    """

    beta: float = 20.0

    scope: ClassVar[Literal["layer", "model"]] = "model"
    source: ClassVar[str] = "PyramidKV, arXiv 2406.02069"

    def __post_init__(self) -> None:
        at_least("beta", self.beta, 1)

    def __call__(self, layers: list[Candidates]) -> list[Int[Tensor, "batch kv_heads"]]:
        """Counts of every layer; with one KV head more or less than another, each layer is weighed by its own."""
        last = max(len(layers) - 1, 1)
        shares = [2 - 1 / self.beta - (2 - 2 / self.beta) * place / last for place in range(len(layers))]
        if len(layers) == 1:
            shares = [1.0]
        return _spread(layers, [[share] * layer.n_kv_heads for share, layer in zip(shares, layers, strict=True)])


@dataclass(frozen=True)
class HeadKV:
    """Budgets in proportion to head scores measured before, over a floor.

    A KV head gets (1 − 1/β) of the uniform free budget b − w, and its share s_h / Σ s of the pool, which is the other 1/β of all
    heads' budgets. A KV head's score is the mean of its group's. Source: HeadKV (arXiv 2410.19258); scores by `criticalkv
    head-scores`, read by `HeadScores.load`.

    Attributes:
        scores: one row per layer, one number per query head (or KV head), not negative.
        beta: β, at least 1: 1 shares everything by score, large values are uniform.
    """

    scores: tuple[tuple[float, ...], ...]
    beta: float = 1.2

    scope: ClassVar[Literal["layer", "model"]] = "model"
    source: ClassVar[str] = "HeadKV, arXiv 2410.19258"

    def __post_init__(self) -> None:
        at_least("beta", self.beta, 1)
        flat = [score for row in self.scores for score in row]
        if not flat or not all(math.isfinite(score) and score >= 0 for score in flat) or not sum(flat):
            raise ValueError(
                f"head scores must be finite, not negative and not all 0; got {len(self.scores)} layers of {flat[:3]} …"
            )

    def __call__(self, layers: list[Candidates]) -> list[Int[Tensor, "batch kv_heads"]]:
        """Counts of every layer.

        Raises:
            ValueError: there are scores for another number of layers or heads.
        """
        if len(layers) != len(self.scores):
            raise ValueError(f"head scores for {len(self.scores)} layers do not fit a model that attends in {len(layers)}")
        grouped = []
        for layer, row in zip(layers, self.scores, strict=True):
            size, rest = divmod(len(row), layer.n_kv_heads)
            if rest or not size:
                raise ValueError(f"{len(row)} head scores do not fit the {layer.n_kv_heads} KV heads of layer {layer.layer}")
            grouped.append([sum(row[k * size : (k + 1) * size]) / size for k in range(layer.n_kv_heads)])
        total, heads = sum(map(sum, grouped)), sum(map(len, grouped))
        shares = [[1 - 1 / self.beta + heads * score / total / self.beta for score in row] for row in grouped]
        return _spread(layers, shares)


def _spread(layers: list[Candidates], shares: list[list[float]]) -> list[Tensor]:
    """Whole free budgets by each head's share of its uniform one; heads alike in all get the same."""
    counts = [torch.zeros(layer.scores.shape[:2], dtype=torch.long, device=layer.scores.device) for layer in layers]
    for row in range(layers[0].scores.shape[0]):
        rooms, mosts = [[getattr(layer, of)[row].tolist() for layer in layers] for of in ("room", "most")]
        flat = [part * own for share, room in zip(shares, rooms, strict=True) for part, own in zip(share, room, strict=True)]
        limits = [most for own in mosts for most in own]
        numbers = iter(apportion(flat, sum(map(sum, rooms)), [min(1, most) for most in limits], limits))
        for layer, count in zip(layers, counts, strict=True):
            own = torch.tensor([next(numbers) for _ in range(layer.n_kv_heads)], device=count.device)
            count[row] = own + layer.held[row]
    return counts
