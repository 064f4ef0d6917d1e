"""The exact minimiser of θ for one query of one head, far beyond the lengths that can be tried exhaustively."""

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bounds.inputs import probabilities
from bounds.optimum.choice import Optimum, limits

NODES = 20_000


def branch_and_bound(
    weights: Float[Tensor, "*rows keys"],
    value_norms: Float[Tensor, "*rows keys"],
    budget: int,
    sink_mass: Float[Tensor, "*rows"] | None = None,
    *,
    protected: Bool[Tensor, "*#rows keys"] | None = None,
    candidates: Bool[Tensor, "*#rows keys"] | None = None,
    nodes: int = NODES,
) -> Optimum:
    """min over |R| = b of θ = C − 2 S + S / σ, S = Σ_R A_i ‖ν_i‖, exactly where `nodes` suffice; else with a certified lower bound.

    θ sees a choice only through (S, σ), falls in σ, and falls in S where σ ≥ ½ (there it is at most C, and above C where σ < ½).
    For every μ ≥ 0 all choices obey S + μ σ ≤ U(μ), the top b of A (‖ν‖ + μ). On that line θ is C − 2 U + 2 μ σ + U / σ − μ,
    convex in σ with its minimum at √(U / 2μ): a lower bound for each μ, of which the best is taken. Where no choice reaches
    σ = ½, θ grows with S, and the lines S − μ σ ≥ the bottom b of A (‖ν‖ − μ) take their place. An entry whose exchange would lift
    the bound to the best choice found is settled; branching is on the dearest of the rest, and the best node is opened first.

    Float64. Each row is solved by itself; the optimum is proved up to 1e-9 of its value, and not proved where θ is below 1e-5 or so of the
    rounding of C. L itself has no such relaxation: the fractional choice b / n of every entry has error 0, so
    nothing is cut off near the root, and the true optimum is for `exhaustive` (n ≤ 20) or, from above, for `local_search`.

    Raises:
        ValueError: the weights are no probabilities, a norm is negative or not finite, or the budget is out of range.
    """
    exact = probabilities(weights, sink_mass).double()
    if weights.shape != value_norms.shape or not bool((value_norms >= 0).all() & value_norms.isfinite().all()):
        raise ValueError(
            f"value_norms {tuple(value_norms.shape)} must be finite, not negative, and one for each of {tuple(weights.shape)}"
        )
    must, may = limits(tuple(weights.shape), budget, protected, candidates, weights.device)
    sink = exact.new_zeros(exact.shape[:-1]) if sink_mass is None else sink_mass.double()
    keep = torch.zeros_like(must)
    value, lower = torch.empty_like(sink), torch.empty_like(sink)
    for row in np.ndindex(tuple(weights.shape[:-1])):
        search = _Search(exact[row].cpu().numpy(), (exact[row] * value_norms[row].double()).cpu().numpy(), float(sink[row]))
        chosen, best, known = search.run(must[row].cpu().numpy(), may[row].cpu().numpy(), budget, nodes)
        keep[row] = torch.from_numpy(chosen).to(keep.device)
        value[row], lower[row] = best, known
    return Optimum(keep, value, lower)


@dataclass(frozen=True)
class _Node:
    """A part of the choices: what is certainly kept, what is still free, and the relaxation's answer."""

    kept: np.ndarray
    free: np.ndarray
    lower: float
    branch: int


class _Search:
    def __init__(self, mass: np.ndarray, sized: np.ndarray, sink: float) -> None:
        self.mass, self.sized, self.sink = mass, sized, sink
        self.whole = float(sized.sum())
        self.total = float(mass.sum()) + sink
        # the slopes at which θ trades S for σ lie between the smallest and the largest norm
        norms = np.divide(sized, mass, out=np.zeros_like(sized), where=mass > 0)
        top = float(norms.max()) or 1.0
        self.slopes = np.concatenate([[0.0], top * np.geomspace(1e-3, 1e2, 24)])

    def theta(self, keep: np.ndarray) -> float:
        """θ, termwise."""
        held = self.sink + self.mass[keep].sum()
        kept = self.sized[keep].sum()
        lost = self.mass[~keep].sum()
        return float(self.sized[~keep].sum() + (lost * (kept / held) if held > 0 else 0))

    def run(self, must: np.ndarray, may: np.ndarray, budget: int, limit: int) -> tuple[np.ndarray, float, float]:
        self.budget = budget
        self.best, self.value = must.copy(), np.inf
        root = self.node(must, may & ~must)
        queue = [(root.lower, 0, root)]
        opened = 0
        while queue and queue[0][0] < self.value and opened < limit:
            _, _, node = heapq.heappop(queue)
            opened += 1
            free = node.free.copy()
            free[node.branch] = False
            kept = node.kept.copy()
            kept[node.branch] = True
            for side, certain in enumerate((kept, node.kept)):
                count = self.budget - int(certain.sum())
                if 0 <= count <= int(free.sum()):
                    child = self.node(certain, free)
                    if child.lower < self.value:
                        heapq.heappush(queue, (max(child.lower, node.lower), 2 * opened + side, child))
        lower = min(queue[0][0] if queue else np.inf, self.value)
        # bounds are differences of numbers as large as C: where θ is all but lost in their rounding, nothing is proved
        margin = 64 * len(self.mass) ** 0.5 * np.finfo(np.float64).eps * self.whole
        if lower < self.value or margin > 1e-9 * self.value > 0:
            lower = max(lower - margin, 0.0)
        return self.best, self.value, lower

    def node(self, kept: np.ndarray, free: np.ndarray) -> _Node:
        """Relax, improve the best choice with the relaxation's own, and settle every entry whose exchange the bound rules out."""
        where = free.nonzero()[0]
        count = self.budget - int(kept.sum())
        if count in (0, len(where)):  # one choice is left
            only = kept | free if count else kept
            self.offer(only)
            return _Node(kept, free, np.inf, -1)
        sized, mass = self.sized[where], self.mass[where]
        base, held = float(self.sized[kept].sum()), self.sink + float(self.mass[kept].sum())
        by_mass = np.sort(mass)
        low, high = held + by_mass[:count].sum(), held + by_mass[-count:].sum()
        sign = 1.0 if high >= self.total / 2 else -1.0  # below ½ θ grows with S
        scores = sign * sized + self.slopes[:, None] * mass
        order = (-scores).argsort(1, kind="stable")
        chosen = order[:, :count]
        line = sign * base + self.slopes * held + np.take_along_axis(scores, chosen, 1).sum(1)  # U(μ)
        self.offer_best(kept, where, chosen, base, held, sized, mass)
        bounds = self.relaxation(line, self.slopes, low, high)
        best = int(bounds.argmax())
        # what exchanging each entry would cost the line: a kept one against the first left out, and the other way round
        own = scores[best]
        last, first = own[order[best, count - 1]], own[order[best, count]]
        inside = np.zeros(len(where), dtype=bool)
        inside[chosen[best]] = True
        cost = np.where(inside, own - first, last - own)
        after = self.relaxation(line[best] - cost, np.full(len(where), self.slopes[best]), low, high)
        settled = after >= self.value
        kept, rest = kept.copy(), free.copy()
        kept[where[settled & inside]] = True
        rest[where[settled]] = False
        if settled.all():
            return _Node(kept, rest, np.inf, -1)
        branch = int(where[np.where(settled, -np.inf, cost).argmax()])
        return _Node(kept, rest, float(bounds[best]), branch)

    def relaxation(self, line: np.ndarray, slope: np.ndarray, low: float, high: float) -> np.ndarray:
        """The least θ on S + μ σ ≤ U (or S − μ σ ≥ −U where σ stays below ½), for σ in [low, high]."""
        if high >= self.total / 2:
            with np.errstate(divide="ignore", invalid="ignore"):
                turn = np.sqrt(self.total * np.maximum(line, 0) / (2 * slope))
            sigma = np.clip(np.where(slope > 0, turn, high), max(low, self.total / 2), high)
            return self.whole - 2 * line + 2 * slope * sigma + self.total * (line / sigma - slope)
        ends = [self.whole + (slope * sigma - line) * (self.total / sigma - 2) for sigma in (high, low) if sigma > 0]
        if not ends:
            return np.full(len(line), self.whole)
        bound = np.minimum.reduce(ends)
        if low <= 0:  # then the line may reach σ = 0, where θ is C; only lines that never rise above it hold there
            bound = np.where(line <= 0, np.minimum(bound, self.whole), -np.inf)
        return bound

    def offer_best(
        self,
        kept: np.ndarray,
        where: np.ndarray,
        chosen: np.ndarray,
        base: float,
        held: float,
        sized: np.ndarray,
        mass: np.ndarray,
    ) -> None:
        """Try the relaxations' own choices."""
        whole, left = base + sized[chosen].sum(1), held + mass[chosen].sum(1)
        mean = np.divide(whole, left, out=np.zeros_like(whole), where=left > 0)
        best = int((self.whole - whole + (self.total - left) * mean).argmin())
        keep = kept.copy()
        keep[where[chosen[best]]] = True
        self.offer(keep)

    def offer(self, keep: np.ndarray) -> None:
        if (value := self.theta(keep)) < self.value:
            self.best, self.value = keep.copy(), value
