"""Neighbours of entries: those near them among the tokens seen, whatever was evicted in between."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from eviction.observation import Observation


def nearby(
    scores: Float[Tensor, "batch heads keys"], seen: Observation, kernel: int, pooling: Literal["max", "mean"]
) -> Float[Tensor, "batch heads keys"]:
    """Maximum or mean of the scores within `kernel` places around each entry; where there is no entry the score is 0, beyond the ends too."""
    pool = functional.max_pool1d if pooling == "max" else functional.avg_pool1d
    if seen.slots is None:
        return pool(scores, kernel, stride=1, padding=kernel // 2)
    there = seen.per_head(seen.places).expand(scores.shape)
    spread = scores.new_zeros(*scores.shape[:2], int(there.amax()) + 2)  # the last one for gaps
    spread.scatter_(2, there.where(there >= 0, spread.shape[2] - 1), scores)
    spread[..., -1] = 0
    return pool(spread, kernel, stride=1, padding=kernel // 2).gather(2, there.clamp(min=0))
