"""The exact truth about a removal: the attention output before and after, and how far apart they are.

Everything takes plain tensors, with any number of leading batch dimensions that broadcast, so that many masks are judged
in one call. Shapes: weights A [*batch, heads, queries, keys] summing to 1 − a0, values V [*batch, kv_heads, keys, value_dim],
W_O as blocks W_h [heads, value_dim, model_dim], keep N [*batch, kv_heads, keys].

A query to which nothing is left (σ = 0: it gave every kept entry the weight 0, as in a sliding window that holds none of them) reads nothing:
ô = 0, which is what scaled dot-product attention returns for a query that sees nothing. All identities and bounds hold with
it. A mask that keeps nothing at all, where there is no sink, is an error.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from perturbation.inputs import exact, exact_values, finite, multiplied, order_p, per_head
from perturbation.inputs import projection as exact_projection

Level = Literal["head", "group", "layer"]


def attention_output(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
) -> Float[Tensor, "*batch heads queries value_dim"]:
    """Σ_i A_i v_i of every head, in value space (before W_O), in float32 or better; a sum, whatever the weights add up to."""
    weights = weights.to(torch.promote_types(torch.float32, weights.dtype))
    return mix(weights, exact_values(values, weights))


def evicted_weights(
    weights: Float[Tensor, "*#batch heads queries keys"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Float[Tensor, "*batch heads queries keys"]:
    """A' = N ⊙ A / σ, the weights after removal: softmax over what is left, the sink included; 0 throughout where σ is 0.

    σ = a0 + Σ_R A_i. Source: arXiv 2502.03805, Theorem 3.2 (there without a sink).

    Raises:
        ValueError: the weights are no probabilities, or the mask does not fit or keeps nothing.
    """
    weights = exact(weights, sink_mass)
    kept = per_head(keep, weights, sink_mass)
    return _survivors(weights, kept, sink_mass)


def evicted_output(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Float[Tensor, "*batch heads queries value_dim"]:
    """Σ_R A_i v_i / σ of every head, in value space: the attention output after removal."""
    weights = exact(weights, sink_mass)
    values = exact_values(values, weights)
    return mix(evicted_weights(weights.to(values.dtype), keep, sink_mass), values)


def output_difference(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
) -> Float[Tensor, "*batch heads queries value_dim"]:
    """o − ô of every head in value space, accurate however small it is.

    o − ô = Σ_i (A_i − A'_i) v_i, where A_i − A'_i is A_i for an evicted entry and −(A_i / σ) (1 − σ) for a kept one, with
    1 − σ summed over the evicted entries. No large numbers are subtracted, so the rounding error is relative to the
    difference's own terms and not to the output.

    Raises:
        ValueError: the weights are no probabilities, shapes do not fit, or the mask keeps nothing.
    """
    weights = exact(weights, sink_mass)
    kept = per_head(keep, weights, sink_mass)
    values = exact_values(values, weights)
    weights = weights.to(values.dtype)
    lost = torch.where(kept, 0, weights).sum(-1, keepdim=True)
    changes = torch.where(kept, -_survivors(weights, kept, sink_mass) * lost, weights)
    return mix(changes, values)


def perturbation(
    weights: Float[Tensor, "*#batch heads queries keys"],
    values: Float[Tensor, "*#batch kv_heads keys value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    keep: Bool[Tensor, "*#batch kv_heads keys"],
    sink_mass: Float[Tensor, "*#batch heads queries"] | None = None,
    *,
    norm: float = 1,
    level: Level = "head",
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
) -> Float[Tensor, "*batch units queries"]:
    """L = ‖Σ_h (o_h − ô_h) W_h‖_p, the exact change of the attention output. Source: arXiv 2502.03805, equation 3.

    The sum runs over one head (`level="head"`, units = heads), over the heads that share a KV head ("group", units =
    KV heads) or over all heads ("layer", units = 1): summed before the norm, so that heads may cancel. In units of the
    residual stream, before any norm or multiplier that follows W_O. A `gate` multiplies the attention output before W_O.

    Examples:
        >>> weights, values = torch.tensor([[[[0.6, 0.3, 0.1]]]]), torch.tensor([[[[1.0], [1.0], [2.0]]]])
        >>> perturbation(weights, values, torch.tensor([[[1.0]]]), torch.tensor([[[True, True, False]]]))  # 1.1 becomes 1
        tensor([[[0.1000]]])

    Raises:
        ValueError: the weights are no probabilities, shapes do not fit, the mask keeps nothing, or `norm` is below 1.
    """
    norm = order_p(norm)
    difference = output_difference(weights, values, keep, sink_mass)
    written = projected_difference(difference, output_projection, values.shape[-3], level, gate)
    return finite(written.norm(p=norm, dim=-1), "the perturbation")


def projected_difference(
    difference: Float[Tensor, "*batch heads queries value_dim"],
    output_projection: Float[Tensor, "heads value_dim model_dim"],
    n_kv_heads: int,
    level: Level = "head",
    gate: Float[Tensor, "*#batch heads queries value_dim"] | None = None,
) -> Float[Tensor, "*batch units queries model_dim"]:
    """Σ_h (g ⊙ Δ_h) W_h over each head, KV group or the whole layer: what reaches the residual stream, with its direction."""
    if level not in ("head", "group", "layer"):
        raise ValueError(f"level is 'head', 'group' or 'layer', not {level!r}")
    heads = difference.shape[-3]
    difference = multiplied(difference, gate)
    blocks = exact_projection(output_projection, difference, heads)
    difference = difference.to(blocks.dtype)
    if level == "head":
        return difference @ blocks
    units = n_kv_heads if level == "group" else 1
    # a unit's heads side by side against their blocks on top of each other: the sum over heads is part of the product
    together = difference.unflatten(-3, (units, -1)).transpose(-3, -2).flatten(-2)
    return together @ blocks.unflatten(0, (units, heads // units)).flatten(1, 2)


def coupling(projected: Float[Tensor, "*batch heads queries model_dim"], *, norm: float = 1) -> Float[Tensor, "*batch queries"]:
    """‖Σ_h Δ_h‖ / Σ_h ‖Δ_h‖ in [0, 1]: 1 where the heads' errors add up, 0 where they cancel.

    1 where no head has an error: there is nothing to cancel, as with a single head.
    """
    apart = projected.norm(p=order_p(norm), dim=-1).sum(-2)
    together = projected.sum(-3).norm(p=norm, dim=-1)
    return finite(torch.where(apart > 0, together / apart.where(apart > 0, 1), 1), "the coupling")


def mix(weights: Tensor, values: Tensor) -> Tensor:
    """Σ_i w_i v_i per head, the heads of a group sharing their values; [*batch, heads, queries, value_dim]."""
    kv_heads = values.shape[-3]
    dtype = torch.promote_types(weights.dtype, values.dtype)
    weights, values = weights.to(dtype), values.to(dtype)
    grouped = weights.unflatten(-3, (kv_heads, -1)).flatten(-3, -2)  # a group's queries in one product
    mixed = grouped @ values
    return mixed.unflatten(-2, (-1, weights.shape[-2])).flatten(-4, -3)


def _survivors(weights: Tensor, kept: Tensor, sink_mass: Tensor | None) -> Tensor:
    """A / σ on the kept entries, 0 elsewhere and where σ is 0. Divided first: at most 1, however small σ is."""
    kept_weights = torch.where(kept, weights, 0)
    mass = kept_weights.sum(-1, keepdim=True)
    if sink_mass is not None:
        mass = mass + sink_mass[..., None].to(mass.dtype)
    return kept_weights / mass.where(mass > 0, 1)
