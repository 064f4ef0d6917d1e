"""Exchange search on the true L2 error, by Gram matrices: a choice that no single exchange improves."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bounds.inputs import evicted, probabilities, spread, triangular
from bounds.optimum.choice import Optimum, least, limits

CANDIDATES = 16
"""Exchanges tried in earnest before the search ends, of those that the Gram matrix likes best."""


def local_search(
    weights: Float[Tensor, "batch heads queries keys"],
    values: Float[Tensor, "batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    keep: Bool[Tensor, "batch kv_heads keys"],
    sink_mass: Float[Tensor, "batch heads queries"] | None = None,
    *,
    protected: Bool[Tensor, "#batch #kv_heads keys"] | None = None,
    candidates: Bool[Tensor, "#batch #kv_heads keys"] | None = None,
    exchanges: int = 1_000,
) -> Optimum:
    """From `keep`, exchange one kept entry for one evicted entry as long as that lowers ‖o − ô‖₂ (mean over a group's heads and the queries).

    With y_i = A_i (v_i − o), o − ô = (1/σ) Σ_E y_i =: r / σ, and an exchange (i out, j in) makes r' = r + y_i − y_j and
    σ' = σ − A_i + A_j. So ‖r'‖² is read off the Gram matrix of the y_i under G_h = W_h W_hᵀ, and every exchange is judged
    exactly without projecting anything; the best of all is made. The result is a local minimum: an upper bound on the optimum,
    which shows how far a policy is from it at least. Never worse than `keep`.

    Float64; memory is group · queries · keys² numbers per KV head: a few thousand keys for a single query, fewer for more.
    Where a query keeps less than 1e-8 of its attention, r / σ has few digits, and a better exchange may be missed.
    Each KV head keeps as many entries as it did. Of equal exchanges the earliest entries are taken.

    Raises:
        ValueError: the inputs are refused as by `theta_o_hat`, or a protected entry is not in `keep`, or an entry of `keep` is no candidate.
    """
    exact = probabilities(weights, sink_mass)
    evicted(keep, exact, sink_mass)
    sinks = torch.zeros_like(exact[..., 0]).double() if sink_mass is None else sink_mass.double()
    exact = exact.double()
    total = exact.sum(-1) + sinks  # 1 up to the rounding of the weights' own dtype, which the identity would feel
    exact, sinks = exact / total[..., None], sinks / total
    vectors, blocks = spread(values.double(), output_projection.double(), 2)
    factor = triangular(blocks)
    shape = tuple(keep.shape)
    must, may = limits(shape, None, protected, candidates, keep.device)
    if bool((must & ~keep).any() | (keep & ~may).any()):
        raise ValueError("keep must hold every protected entry and nothing but candidates")
    found, value = keep.clone(), torch.empty(shape[:2], dtype=torch.float64, device=keep.device)
    group = exact.shape[1] // shape[1]
    for batch, head in np.ndindex(shape[:2]):
        heads = slice(head * group, (head + 1) * group)
        share, sink = exact[batch, heads], sinks[batch, heads]
        output = share @ vectors[batch, head]  # [group, queries, value_dim]
        apart = vectors[batch, head] - output[..., None, :]  # v_i − o
        moved = (share[..., None] * apart) @ factor[head, :, None]  # y_i [group, queries, keys, min(value_dim, model_dim)]
        placed = (vectors[batch, head] @ factor[head])[:, None].expand_as(moved)  # what each entry writes, up to a rotation
        rows = _Rows(moved.flatten(0, 1), placed.flatten(0, 1), share.flatten(0, 1), sink.flatten())
        row = batch, head
        found[row], value[row] = rows.search(keep[row], may[row] & ~must[row], exchanges)
    return Optimum(found, value, torch.zeros_like(value))


class _Rows:
    """The queries and heads that share one KV head's choice, as rows."""

    def __init__(self, moved: Tensor, placed: Tensor, share: Tensor, sink: Tensor) -> None:
        self.moved = moved  # y_i [rows, keys, dim]
        self.share = share  # A [rows, keys]
        self.sink = sink  # a0 [rows]
        self.placed = placed  # ν_i [rows, keys, dim]
        self.size = (share[:, None] @ placed).squeeze(1).norm(dim=-1)  # ‖o‖, the error where nothing is left
        self.gram = moved @ moved.mT  # [rows, keys, keys]

    def error(self, keep: Tensor) -> Tensor:
        """Mean over the rows of ‖o − ô‖, term by term: r / σ has no digits where σ is small."""
        kept, gone = self.share * keep, self.share * ~keep
        mass = (self.sink + kept.sum(-1))[:, None]
        survivors = kept / mass.where(mass > 0, 1)
        change = (gone - gone.sum(-1, keepdim=True) * survivors)[:, None] @ self.placed
        return change.squeeze(1).norm(dim=-1).mean()

    def exchanged(self, keep: Tensor, leaving: Tensor, coming: Tensor) -> Tensor:
        """The error after each exchange [leaving, coming]."""
        rest = (self.moved * ~keep[:, None]).sum(1)  # r [rows, dim]
        along = (self.moved @ rest[..., None]).squeeze(-1)  # r · y_i
        own = self.gram.diagonal(dim1=-2, dim2=-1)
        mass = self.sink + (self.share * keep).sum(-1)
        total = torch.zeros(len(leaving), len(coming), dtype=rest.dtype, device=rest.device)
        for row in range(len(rest)):  # one row's table at a time
            out = (own[row] + 2 * along[row])[leaving]
            into = (own[row] - 2 * along[row])[coming]
            square = rest[row].square().sum() + out[:, None] + into - 2 * self.gram[row][leaving][:, coming]
            left = mass[row] - self.share[row, leaving][:, None] + self.share[row, coming]
            alive = left > 1e-15  # below, what is left is the rounding of a difference
            total += torch.where(alive, square.clamp(min=0).sqrt() / left.where(alive, 1), self.size[row])
        return total / len(rest)

    def search(self, keep: Tensor, free: Tensor, exchanges: int) -> tuple[Tensor, Tensor]:
        value = self.error(keep)
        for _ in range(exchanges):
            leaving, coming = (keep & free).nonzero()[:, 0], (~keep & free).nonzero()[:, 0]
            if not len(leaving) or not len(coming):
                break
            # the table is exact up to rounding: of its best few, the first that truly is better
            for best in least(self.exchanged(keep, leaving, coming).flatten(), CANDIDATES).tolist():
                other = keep.clone()
                other[leaving[best // len(coming)]] = False
                other[coming[best % len(coming)]] = True
                if float(found := self.error(other)) < float(value):
                    keep, value = other, found
                    break
            else:
                break
        return keep, value
