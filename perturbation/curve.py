"""The whole budget curve of a ranking from one sort: L and σ at every budget for about the price of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from perturbation.inputs import exact, exact_values, finite, order_p
from perturbation.output import Level, coupling, output_difference, projected_difference

SMALL = 1e-16
"""A retained mass below which a budget is computed by itself."""


@dataclass(frozen=True)
class Curve:
    """What keeping the first b entries of a ranking does, for each b of `budgets` (a leading dimension of every tensor).

    `difference` is o − ô in value space and `retained_mass` σ; L at any level and in any norm is one projection away.
    """

    budgets: tuple[int, ...]
    difference: Float[Tensor, "budgets *batch heads queries value_dim"]
    retained_mass: Float[Tensor, "budgets *batch heads queries"]
    n_kv_heads: int

    def perturbation(
        self,
        output_projection: Float[Tensor, "heads value_dim model_dim"],
        *,
        norm: float = 1,
        level: Level = "head",
        gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
    ) -> Float[Tensor, "budgets *batch units queries"]:
        """L at each budget, as `perturbation.perturbation` gives it mask by mask. One budget is projected at a time."""
        norm = order_p(norm)
        sizes = [
            projected_difference(one, output_projection, self.n_kv_heads, level, gate).norm(p=norm, dim=-1)
            for one in self.difference
        ]
        return finite(torch.stack(sizes), "the perturbation")

    def coupling(
        self,
        output_projection: Float[Tensor, "heads value_dim model_dim"],
        *,
        norm: float = 1,
        gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
    ) -> Float[Tensor, "budgets *batch queries"]:
        """‖Σ_h Δ_h‖ / Σ_h ‖Δ_h‖ at each budget."""
        return torch.stack(
            [
                coupling(projected_difference(one, output_projection, self.n_kv_heads, "head", gate), norm=norm)
                for one in self.difference
            ]
        )


def ranking(
    scores: Shaped[Tensor, "*batch keys"], first: Bool[Tensor, "*#batch keys"] | None = None
) -> Int[Tensor, "*batch keys"]:
    """Entries of each row from the highest score to the lowest, equal scores by position; those of `first` (a window) before all others.

    Raises:
        ValueError: a score is NaN.
    """
    if scores.is_floating_point() and bool(scores.isnan().any()):
        raise ValueError(f"{int(scores.isnan().sum())} of {scores.numel()} scores are NaN")
    order = scores.argsort(dim=-1, descending=True, stable=True)
    if first is None:
        return order
    ahead = first.expand_as(scores).gather(-1, order)
    return order.gather(-1, ahead.to(torch.int8).argsort(dim=-1, descending=True, stable=True))


def budget_curve(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    order: Int[Tensor, "*#batch kv_heads keys"],
    budgets: Sequence[int],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Curve:
    """o − ô and σ when each KV head keeps the first b entries of `order`, for every b in `budgets`.

    With the entries in order, Σ_R A_i and Σ_R A_i v_i are prefix sums and Σ_E the matching suffix sums, so that all budgets
    together cost one product A V; o − ô = Σ_E A v − (1 − σ) (Σ_R A v) / σ as in `output_difference`, term by term. Weights, values
    and sink mass are what attention used; several rankings go along a leading dimension.

    Args:
        order: a permutation of the entries per KV head, most important first (`ranking` makes one).
        budgets: entries kept per KV head, from 1 (0 where there is a sink) to the number of keys; any order, repeats allowed.

    Raises:
        ValueError: a budget is out of range, `order` is no permutation, or the weights and values are not as they should be.
    """
    weights = exact(weights, sink_mass)
    values = exact_values(values, weights)
    weights = weights.to(values.dtype)
    keys, kv_heads = weights.shape[-1], values.shape[-3]
    least = 0 if sink_mass is not None and bool((sink_mass > 0).all()) else 1
    if not budgets or (outside := [b for b in budgets if not least <= b <= keys]):
        raise ValueError(f"budgets lie between {least} and the {keys} keys; got {list(budgets) if not budgets else outside}")
    if order.shape[-2:] != (kv_heads, keys) or not bool(
        (order.sort(dim=-1).values == torch.arange(keys, device=order.device)).all()
    ):
        raise ValueError(
            f"order {tuple(order.shape)} must hold each of the {keys} entries once for each of {kv_heads} KV heads"
        )
    grouped = weights.unflatten(-3, (kv_heads, -1)).flatten(-3, -2)  # [*batch, kv_heads, group · queries, keys]
    batch = torch.broadcast_shapes(grouped.shape[:-3], values.shape[:-3], order.shape[:-2])
    order = order.long().expand(*batch, *order.shape[-2:])
    ranked = grouped.expand(*batch, *grouped.shape[-3:]).gather(-1, order[..., None, :].expand(*batch, *grouped.shape[-3:]))
    mixed = values.expand(*batch, *values.shape[-3:]).gather(-2, order[..., None].expand(*batch, *values.shape[-3:]))
    edges = sorted({0, *budgets, keys})
    pieces = list(pairwise(edges))
    mass = torch.stack([ranked[..., low:high].sum(-1) for low, high in pieces])
    read = torch.stack([ranked[..., low:high] @ mixed[..., low:high, :] for low, high in pieces])
    at = torch.tensor([edges.index(b) for b in budgets], device=weights.device)
    kept, lost = _before(mass)[at], _after(mass)[at]
    if sink_mass is not None:
        kept = kept + sink_mass.to(kept.dtype).unflatten(-2, (kv_heads, -1)).flatten(-2)
    survivors = _before(read)[at] / kept.where(kept > 0, 1)[..., None]  # ô, or 0 where σ is 0
    difference = _after(read)[at] - lost[..., None] * survivors
    heads_queries = (-1, weights.shape[-2])
    difference = difference.unflatten(-2, heads_queries).flatten(-4, -3)
    kept = kept.unflatten(-1, heads_queries).flatten(-3, -2)
    for index, budget in enumerate(budgets):
        # where σ is so small that A v underflows, the sums have no digits: there each weight is divided first
        if bool(((kept[index] > 0) & (kept[index] < SMALL)).any()):
            keep = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., :budget], True)
            difference[index] = output_difference(weights, values, keep, sink_mass)
    return Curve(tuple(budgets), difference, kept, kv_heads)


def _before(pieces: Tensor) -> Tensor:
    """Sums over the pieces before each edge: the first is 0."""
    return torch.cat([torch.zeros_like(pieces[:1]), pieces.cumsum(0)])


def _after(pieces: Tensor) -> Tensor:
    """Sums over the pieces after each edge, the last is 0; summed from the end, so that a small rest keeps its digits."""
    return torch.cat([pieces.flip(0).cumsum(0).flip(0), torch.zeros_like(pieces[:1])])
