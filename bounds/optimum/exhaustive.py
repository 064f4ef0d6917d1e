"""Every choice tried: the true optimum of any objective at small n, to hold everything else against."""

import math
from collections.abc import Callable
from itertools import combinations, islice

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bounds.centred import theta_o_hat
from bounds.optimum.choice import Optimum, limits
from bounds.theta import theta

LIMIT = 200_000
"""Choices tried per row at most: C(20, 10) = 184,756 are within it."""

CHUNK = 8_192

Objective = Callable[[tuple[int, int], Tensor], Tensor]
"""(batch row, KV head), masks [choices, keys] → the value of each [choices]."""


def exhaustive(
    objective: Objective,
    shape: tuple[int, int, int],
    budget: int,
    *,
    protected: Bool[Tensor, "#batch #kv_heads keys"] | None = None,
    candidates: Bool[Tensor, "#batch #kv_heads keys"] | None = None,
    device: torch.device | str = "cpu",
    limit: int = LIMIT,
) -> Optimum:
    """The keep-mask of exactly `budget` entries that minimises `objective`, for each (batch row, KV head) of `shape`.

    Of equal values the choice that keeps the earlier entries wins, so the answer is the same on every machine.

    Args:
        objective: takes a row's place and masks [choices, keys], returns their values.
        shape: (batch, kv_heads, keys).
        budget: entries kept, the protected ones among them.
        protected: entries that must be kept. candidates: entries that may be kept (pads may not).
        limit: refuse more choices than this.

    Raises:
        ValueError: there are more choices than `limit`, the budget is out of range, or the objective is not finite.
    """
    must, may = limits(shape, budget, protected, candidates, torch.device(device))
    keep = torch.zeros(shape, dtype=torch.bool, device=device)
    value = torch.empty(shape[:2], dtype=torch.float64, device=device)
    for row in np.ndindex(shape[:2]):
        free = (may[row] & ~must[row]).nonzero()[:, 0].tolist()
        count = budget - int(must[row].sum())
        if (choices := math.comb(len(free), count)) > limit:
            raise ValueError(
                f"{count} of {len(free)} entries are {choices:,} choices, more than {limit:,}: try a shorter context (n ≤ 20 always "
                "fits), branch_and_bound, dinkelbach or local_search"
            )
        best = math.inf
        picks = combinations(free, count)
        while chunk := list(islice(picks, CHUNK)):
            masks = must[row].expand(len(chunk), -1).clone()
            if count:
                masks.scatter_(1, torch.tensor(chunk, device=device), True)
            values = objective((int(row[0]), int(row[1])), masks)
            if not bool(values.isfinite().all()):
                raise ValueError(
                    f"the objective is not finite for {int((~values.isfinite()).sum())} of {len(values)} choices of row {row}"
                )
            first = int(values.argmin())  # argmin takes the first of equals
            if float(values[first]) < best:
                best = float(values[first])
                keep[row] = masks[first]
        value[row] = best
    return Optimum(keep, value, value)


def minimal_theta(
    weights: Float[Tensor, "batch heads queries keys"],
    value_norms: Float[Tensor, "batch heads #queries keys"],
    n_kv_heads: int,
    budget: int,
    sink_mass: Float[Tensor, "batch heads queries"] | None = None,
    *,
    protected: Bool[Tensor, "#batch #kv_heads keys"] | None = None,
    candidates: Bool[Tensor, "#batch #kv_heads keys"] | None = None,
) -> Optimum:
    """The choice of each KV head that minimises θ, averaged over its group's heads and the queries.

    Raises:
        ValueError: more than `LIMIT` choices, or inputs that `theta` refuses.
    """
    sinks = torch.zeros_like(weights[..., 0]) if sink_mass is None else sink_mass

    def objective(row: tuple[int, int], masks: Tensor) -> Tensor:
        own, norms, sink = (of_row(row, n_kv_heads, tensor) for tensor in (weights, value_norms, sinks))
        return theta(own, norms, masks[:, None], sink).mean((-2, -1))

    shape = (weights.shape[0], n_kv_heads, weights.shape[-1])
    return exhaustive(objective, shape, budget, protected=protected, candidates=candidates, device=weights.device)


def minimal_theta_o_hat(
    weights: Float[Tensor, "batch heads queries keys"],
    values: Float[Tensor, "batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    budget: int,
    sink_mass: Float[Tensor, "batch heads queries"] | None = None,
    *,
    norm: float = 1,
    protected: Bool[Tensor, "#batch #kv_heads keys"] | None = None,
    candidates: Bool[Tensor, "#batch #kv_heads keys"] | None = None,
) -> Optimum:
    """The choice of each KV head that minimises θ_ô, averaged over its group's heads and the queries.

    Raises:
        ValueError: more than `LIMIT` choices, or inputs that `theta_o_hat` refuses.
    """
    kv_heads = values.shape[1]
    sinks = torch.zeros_like(weights[..., 0]) if sink_mass is None else sink_mass
    blocks = output_projection[None]  # as if of one batch row

    def objective(row: tuple[int, int], masks: Tensor) -> Tensor:
        own, sink, read = (of_row(row, kv_heads, tensor) for tensor in (weights, sinks, values))
        return theta_o_hat(own, read, of_row((0, row[1]), kv_heads, blocks)[0], masks[:, None], sink, norm=norm).mean((-2, -1))

    shape = (weights.shape[0], kv_heads, weights.shape[-1])
    return exhaustive(objective, shape, budget, protected=protected, candidates=candidates, device=weights.device)


def of_row(row: tuple[int, int], n_kv_heads: int, tensor: Tensor) -> Tensor:
    """The heads of one KV head in one batch row, [1, group, …] of [batch, heads, …]."""
    group = tensor.shape[1] // n_kv_heads
    return tensor[row[0], None, row[1] * group : (row[1] + 1) * group]
