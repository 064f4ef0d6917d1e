"""How far a choice is from the best possible one, in θ and in truth."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bounds.norms import projected_norms
from bounds.optimum import LIMIT, branch_and_bound, exhaustive, local_search, minimal_theta
from bounds.optimum.exhaustive import of_row
from bounds.theta import theta
from perturbation.output import perturbation


@dataclass(frozen=True)
class Gap:
    """A choice against the best of the same size, per batch row and KV head; means over the group's heads and the queries.

    Where an optimum is `proved`, nothing is better. Else `theta_optimum` is what no choice can beat, and `perturbation_optimum` the best that
    was found: the choice is at least so far from the best in truth.
    """

    theta: Float[Tensor, "batch kv_heads"]
    theta_optimum: Float[Tensor, "batch kv_heads"]
    theta_proved: Bool[Tensor, "batch kv_heads"]
    perturbation: Float[Tensor, "batch kv_heads"]
    perturbation_optimum: Float[Tensor, "batch kv_heads"]
    perturbation_proved: Bool[Tensor, "batch kv_heads"]

    @property
    def in_theta(self) -> Float[Tensor, "batch kv_heads"]:
        """θ / θ of the optimum, at least 1; 1 where both are 0."""
        return _ratio(self.theta, self.theta_optimum)

    @property
    def in_truth(self) -> Float[Tensor, "batch kv_heads"]:
        """L / L of the optimum, at least 1; 1 where both are 0, and the largest number of the dtype where only the optimum's is."""
        return _ratio(self.perturbation, self.perturbation_optimum)


def gap(
    weights: Float[Tensor, "batch heads queries keys"],
    values: Float[Tensor, "batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    keep: Bool[Tensor, "batch kv_heads keys"],
    sink_mass: Float[Tensor, "batch heads queries"] | None = None,
    *,
    norm: float = 1,
    protected: Bool[Tensor, "#batch #kv_heads keys"] | None = None,
    candidates: Bool[Tensor, "#batch #kv_heads keys"] | None = None,
) -> Gap:
    """The gap of `keep`, which holds the same number of entries in each row and KV head, to the optimum of that size.

    Up to `LIMIT` choices (n ≤ 20 always) both optima are found by trying all. Beyond, for one query of one head per KV head, the least θ comes
    from branch-and-bound and the least L from exchange search on the L2 error, starting at `keep`.

    Raises:
        ValueError: keep breaks what is protected or barred, rows keep different numbers of entries, or there are too many
            choices and several queries or heads share one.
    """
    for mask, kind in ((protected, "protected"), (candidates, "candidates")):
        wrong = None if mask is None else (mask & ~keep if kind == "protected" else keep & ~mask)
        if wrong is not None and bool(wrong.any()):
            raise ValueError(
                f"keep must hold every protected entry and nothing but candidates; {int(wrong.sum())} entries break that ({kind})"
            )
    counts = keep.sum(-1)
    if bool((counts != counts.flatten()[0]).any()):
        raise ValueError(f"every KV head must keep the same number of entries, not {sorted(set(counts.flatten().tolist()))}")
    budget, kv_heads = int(counts.flatten()[0]), keep.shape[1]
    norms = projected_norms(values, output_projection, norm=norm)
    inputs = (values, output_projection, keep, sink_mass)
    truth = _per_row(perturbation(weights, *inputs, norm=norm), kv_heads)
    bound = _per_row(theta(weights, norms, keep, sink_mass), kv_heads)
    sinks = torch.zeros_like(weights[..., 0]) if sink_mass is None else sink_mass
    must = None if protected is None else protected.expand_as(keep)
    may = None if candidates is None else candidates.expand_as(keep)
    fixed = 0 if must is None else int(must.sum(-1).min())
    free = (keep.shape[-1] if may is None else int(may.sum(-1).max())) - fixed
    group = weights.shape[1] // kv_heads
    if math.comb(free, budget - fixed) <= LIMIT:

        def objective(row: tuple[int, int], masks: Tensor) -> Tensor:
            own, sink, read = (of_row(row, kv_heads, tensor) for tensor in (weights, sinks, values))
            blocks = of_row((0, row[1]), kv_heads, output_projection[None])[0]
            return perturbation(own, read, blocks, masks[:, None], sink, norm=norm).mean((-2, -1))

        best_theta = minimal_theta(weights, norms, kv_heads, budget, sink_mass, protected=must, candidates=may)
        shape = (keep.shape[0], kv_heads, keep.shape[-1])
        best_truth = exhaustive(objective, shape, budget, protected=must, candidates=may, device=keep.device)
        return Gap(bound, best_theta.lower, best_theta.proved, truth, best_truth.value, best_truth.proved)
    if group * weights.shape[2] > 1:
        raise ValueError(
            f"{budget - fixed} of {free} entries cannot all be tried, and beyond that the optimum is searched for one query of one head: give "
            f"weights with 1 query and values repeated per head, not {weights.shape[2]} queries and groups of {group}"
        )
    best_theta = branch_and_bound(weights[:, :, 0], norms[:, :, 0], budget, sinks[..., 0], protected=must, candidates=may)
    searched = local_search(weights, values, output_projection, keep, sink_mass, protected=must, candidates=may)
    found = _per_row(perturbation(weights, values, output_projection, searched.keep, sink_mass, norm=norm), kv_heads)
    return Gap(
        bound, best_theta.lower, best_theta.proved, truth, torch.minimum(found, truth), torch.zeros_like(best_theta.proved)
    )


def _per_row(per_head: Tensor, kv_heads: int) -> Tensor:
    """Mean over a group's heads and the queries, [batch, kv_heads]."""
    return per_head.unflatten(1, (kv_heads, -1)).mean((-2, -1))


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    above, below = above.double(), below.double()
    ratio = torch.where(below > 0, above / below.where(below > 0, 1), torch.finfo(torch.float64).max)
    return torch.where(above <= below, 1, ratio).clamp(max=torch.finfo(torch.float64).max)
