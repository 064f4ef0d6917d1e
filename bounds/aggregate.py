"""From one head and one query to groups, layers and windows: what is guaranteed there, and what is not.

Nothing here, and nothing else in this package, bounds a query that has not been seen: whatever a mask evicts, a later query may
put all its attention on it. A guarantee over a window is one for the window's queries.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bounds.inputs import chosen, sizes


def over_heads(
    bound: Float[Tensor, "*batch heads queries"], n_kv_heads: int, level: Literal["group", "layer"] = "layer"
) -> Float[Tensor, "*batch units queries"]:
    """Σ_h of a per-head bound: bounds ‖Σ_h Δ_h‖, the error of a KV group's or the layer's output.

    Proof: the triangle inequality over heads. Heads may cancel (`perturbation.coupling` says how much), which this cannot see.

    Raises:
        ValueError: the KV heads do not divide the heads.
    """
    if level not in ("group", "layer"):
        raise ValueError(f"level is 'group' or 'layer', not {level!r}")
    heads = bound.shape[-2]
    units = n_kv_heads if level == "group" else 1
    if units < 1 or heads % units:
        raise ValueError(f"{heads} heads do not divide into {units} units")
    return bound.unflatten(-2, (units, heads // units)).sum(-2)


def over_window(
    bound: Float[Tensor, "*batch heads queries"],
    how: Literal["mean", "max"] = "mean",
    valid: Bool[Tensor, "*#batch queries"] | None = None,
) -> Float[Tensor, "*batch heads"]:
    """Mean or maximum over the window's queries: bounds the mean or the maximum of L over the same queries.

    Proof: L_t ≤ bound_t for each t, and both are monotone. `valid` leaves out queries that are pads.

    The bound of the mean weights is not one: θ is not concave in A, and θ(mean_t A_t) may lie below mean_t L_t. Use
    `accumulated_bound` where only accumulated attention is at hand.

    Raises:
        ValueError: a row has no valid query.
    """
    if how not in ("mean", "max"):
        raise ValueError(f"how is 'mean' or 'max', not {how!r}")
    if valid is None:
        return bound.mean(-1) if how == "mean" else bound.amax(-1)
    if not bool(valid.any(-1).all()):
        raise ValueError("a row of the batch has no valid query, so there is nothing to take the mean or maximum of")
    seen = valid[..., None, :]
    if how == "max":
        return bound.masked_fill(~seen, 0).amax(-1)
    return bound.masked_fill(~seen, 0).sum(-1) / seen.sum(-1)


def accumulated_bound(
    accumulated: Float[Tensor, "*#batch heads keys"],
    value_norms: Float[Tensor, "*#batch heads 1 keys"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
) -> Float[Tensor, "*batch heads"]:
    """Σ_E s_i (‖ν_i‖ + max_R ‖ν‖): what attention accumulated over a window guarantees for that window, by itself.

    With s = mean_t A_t it bounds mean_t θ_t, and so mean_t L_t; with s = max_t A_t (the worst case over the window) it bounds
    max_t θ_t, and so max_t L_t.

    Proof: (1/σ_t − 1) Σ_R A_t ‖ν‖ ≤ (1 − σ_t) max_R ‖ν‖ and 1 − σ_t = Σ_E A_t, so θ_t ≤ Σ_E A_{t,i} (‖ν_i‖ + max_R ‖ν‖), which is
    linear and increasing in A_t.

    Raises:
        ValueError: the scores are negative or not finite, or shapes do not fit.
    """
    if not bool((accumulated >= 0).all() & accumulated.isfinite().all()):
        raise ValueError("accumulated attention must be finite and not negative")
    scores = accumulated.to(torch.promote_types(torch.float32, accumulated.dtype))[..., None, :]
    norms = sizes(value_norms, scores)
    gone = ~chosen(keep, scores)
    largest = (norms * ~gone).amax(-1, keepdim=True)
    return (scores * gone * (norms + largest)).sum(-1).squeeze(-1)
