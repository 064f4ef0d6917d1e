"""θ and σ at every budget of a ranking, from one pass over its entries."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bounds.inputs import probabilities, sizes
from bounds.theta import theta

SMALL = 1e-16
"""A retained mass below which a budget is computed by itself."""


@dataclass(frozen=True)
class BoundCurve:
    """θ and σ when each KV head keeps the first b entries of a ranking, for each b of `budgets` (a leading dimension)."""

    budgets: tuple[int, ...]
    theta: Float[Tensor, "budgets *batch heads queries"]
    retained_mass: Float[Tensor, "budgets *batch heads queries"]


def bound_curve(
    weights: Float[Tensor, "*#batch heads queries keys"],
    value_norms: Float[Tensor, "*#batch heads #queries keys"],
    order: Int[Tensor, "*#batch kv_heads keys"],
    budgets: Sequence[int],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> BoundCurve:
    """`theta` and `retained_mass` of every budget at once.

    The budgets cut the ranking into pieces. One product with the pieces' indicator gives each piece's Σ A_i and Σ A_i ‖ν_i‖;
    what is kept and what is evicted are their running sums from either end, so that neither is a difference of large numbers. Weights,
    norms and sink mass are as `theta` takes them.

    Args:
        order: a permutation of the entries per KV head, most important first (`perturbation.ranking` makes one).
        budgets: entries kept per KV head, from 1 (0 where every query has a sink) to the number of keys.

    Raises:
        ValueError: a budget is out of range, `order` is no permutation, or the inputs are refused as by `theta`.
    """
    weights = probabilities(weights, sink_mass)
    norms = sizes(value_norms, weights)
    keys, kv_heads = weights.shape[-1], order.shape[-2]
    lowest = 1 if sink_mass is None or bool((sink_mass == 0).any()) else 0
    if not budgets or min(budgets) < lowest or max(budgets) > keys:
        raise ValueError(f"budgets must lie in [{lowest}, {keys}], the number of keys; got {list(budgets)}")
    if order.shape[-1] != keys or weights.shape[-3] % kv_heads:
        raise ValueError(f"order {tuple(order.shape)} does not fit the heads and keys of weights {tuple(weights.shape)}")
    order, places = order.long(), torch.arange(keys, device=order.device)
    if bool((order.sort(dim=-1).values != places).any()):
        raise ValueError(f"order is no permutation of {keys} entries: some stand in it twice, others not at all")
    place = torch.empty_like(order).scatter(-1, order, places.expand_as(order))
    cuts = sorted({*budgets, keys})
    piece = torch.bucketize(place, torch.tensor(cuts, device=order.device), right=True)  # [*batch, kv_heads, keys]
    inside = torch.nn.functional.one_hot(piece, len(cuts)).to(norms.dtype)[..., None, :, :]  # pieces 0 … len(cuts) − 1
    grouping = (kv_heads, -1)
    mass = (weights.to(norms.dtype).unflatten(-3, grouping) @ inside).flatten(-4, -3)  # [*batch, heads, queries, pieces]
    sized = ((weights * norms).unflatten(-3, grouping) @ inside).flatten(-4, -3)
    at = torch.tensor([cuts.index(b) + 1 if b else 0 for b in budgets], device=order.device)
    held_mass, lost_mass = _kept(mass, at), _lost(mass, at)
    if sink_mass is not None:
        held_mass = held_mass + sink_mass[..., None].to(held_mass.dtype)
    bound = _lost(sized, at) + lost_mass * (_kept(sized, at) / held_mass.where(held_mass > 0, 1))
    bound, held_mass = bound.movedim(-1, 0), held_mass.movedim(-1, 0)
    for index, budget in enumerate(budgets):
        if bool(((held_mass[index] > 0) & (held_mass[index] < SMALL)).any()):  # A ‖ν‖ underflows: each weight is divided first
            bound[index] = theta(weights, norms, place < budget, sink_mass)
    return BoundCurve(tuple(budgets), bound, held_mass)


def _kept(pieces: Tensor, at: Tensor) -> Tensor:
    """Sum of the pieces before each cut."""
    return torch.nn.functional.pad(pieces.cumsum(-1), (1, 0))[..., at]


def _lost(pieces: Tensor, at: Tensor) -> Tensor:
    """Sum of the pieces from each cut on."""
    return torch.nn.functional.pad(pieces.flip(-1).cumsum(-1).flip(-1), (0, 1))[..., at]
