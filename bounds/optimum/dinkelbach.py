"""The exact minimiser of a ratio bound at any length."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bounds.inputs import probabilities
from bounds.optimum.choice import Optimum, limits


def dinkelbach(
    weights: Float[Tensor, "*rows keys"],
    distances: Float[Tensor, "*rows keys"],
    budget: int,
    sink_mass: Float[Tensor, "*rows"] | None = None,
    *,
    protected: Bool[Tensor, "*#rows keys"] | None = None,
    candidates: Bool[Tensor, "*#rows keys"] | None = None,
) -> Optimum:
    """min over |R| = b of (Σ_E A_i d_i) / σ for fixed d_i ≥ 0, exactly: θ_o with d_i = ‖ν_i − o‖.

    Start from the top b of A; with λ the ratio so far, keep the top b of A_i (d_i + λ), until the ratio stops falling.

    Proof: the ratio is at most λ for some R exactly where min_R (Σ_E A_i d_i − λ σ) ≤ 0, and the top b of A_i (d_i + λ) attain that
    minimum, since Σ_E A_i d_i − λ σ = Σ_i A_i d_i − λ a0 − Σ_R A_i (d_i + λ). If the minimum is 0, λ is the optimum; if it is
    negative, the ratio of its R is less than λ. There are finitely many R, so it ends; it does so in a handful of rounds
    (Dinkelbach, 1967, Management Science 13(7)).

    Each row (a query of a head, or accumulated attention of a KV head) is solved by itself; ties go to the earlier entry. Computed in
    float64. A row of which no candidate has attention has no ratio: its value is Σ_E A_i d_i, which no choice changes.

    Args:
        weights: A, summing to 1 − a0 in each row.
        distances: d, not negative.
        budget: entries kept, the protected ones among them.
        sink_mass: a0, part of σ whatever is kept.
        protected: entries that must be kept. candidates: entries that may be kept (pads may not).

    Raises:
        ValueError: the weights are no probabilities, a distance is negative or not finite, or the budget is out of range.
    """
    exact = probabilities(weights, sink_mass).double()
    if not bool((distances >= 0).all() & distances.isfinite().all()):
        raise ValueError("distances must be finite and not negative")
    must, may = limits(tuple(weights.shape), budget, protected, candidates, weights.device)
    lost_each = exact * distances.double()
    sink = exact.new_zeros(exact.shape[:-1]) if sink_mass is None else sink_mass.double()

    def choose(scores: Tensor) -> Tensor:
        # protected entries first, then candidates, then the rest: three ranks, each by score; no score is made up
        rank = must.to(torch.int8) + may.to(torch.int8)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, rank.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
        return torch.zeros_like(must).scatter(-1, order[..., :budget], True)

    def ratio(keep: Tensor) -> Tensor:
        mass = sink + (exact * keep).sum(-1)
        alive = mass > torch.finfo(mass.dtype).tiny
        return (lost_each * ~keep).sum(-1) / mass.where(alive, 1)

    keep = choose(exact)
    value = ratio(keep)
    while True:
        other = choose(exact * (distances.double() + value[..., None]))
        better = (found := ratio(other)) < value
        if not bool(better.any()):
            return Optimum(keep, value, value)
        keep, value = torch.where(better[..., None], other, keep), torch.where(better, found, value)
