"""Neighbours of entries: those near them among the tokens seen, whatever was evicted in between."""

from collections.abc import Callable
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
    return _over_places(scores, seen, lambda spread: pool(spread, kernel, stride=1, padding=kernel // 2))


def reaching(
    scores: Float[Tensor, "batch heads keys"], seen: Observation, before: int, after: int
) -> Float[Tensor, "batch heads keys"]:
    """Maximum of the scores (none negative) that reach each entry: a score reaches `before` places back and `after` places on."""
    return _over_places(
        scores,
        seen,
        lambda spread: functional.max_pool1d(functional.pad(spread, (after, before)), before + after + 1, stride=1),
    )


def _over_places(scores: Tensor, seen: Observation, pool: Callable[[Tensor], Tensor]) -> Tensor:
    if seen.slots is None:
        return pool(scores)
    there = seen.per_head(seen.places).expand(scores.shape)
    spread = scores.new_zeros(*scores.shape[:2], int(there.amax()) + 2)  # the last one for gaps
    spread.scatter_(2, there.where(there >= 0, spread.shape[2] - 1), scores)
    spread[..., -1] = 0
    return pool(spread).gather(2, there.clamp(min=0))
