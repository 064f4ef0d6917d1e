"""What every removal is checked for before it is judged: bad input is refused with its shape or value, never answered."""

import torch
from torch import Tensor


def exact(weights: Tensor, sink_mass: Tensor | None = None) -> Tensor:
    """The attention probabilities in float32 or better.

    Raises:
        ValueError: they are not finite, negative, or do not sum to 1 − a0 within what their dtype can hold; or autocast is on.
    """
    if torch.is_autocast_enabled(weights.device.type):
        raise ValueError(
            "autocast is on, which would compute this in low precision: call it under torch.autocast(device_type, enabled=False)"
        )
    given = torch.finfo(weights.dtype)
    weights = weights.to(torch.promote_types(torch.float32, weights.dtype))
    if not weights.numel():
        raise ValueError(f"weights {tuple(weights.shape)} are empty: at least one head, query and key are needed")
    if (lowest := float(weights.amin())) < 0:
        raise ValueError(f"weights are probabilities, but the lowest of {tuple(weights.shape)} is {lowest:g}")
    missing = weights.sum(-1) - 1 if sink_mass is None else weights.sum(-1) + sink_mass - 1
    if sink_mass is not None and not bool(((sink_mass >= 0) & (sink_mass <= 1)).all()):
        raise ValueError(f"sink_mass is a probability, but lies in [{float(sink_mass.min()):g}, {float(sink_mass.max()):g}]")
    # float64 often holds what a softmax in float32 gave
    allowed = 8 * given.eps + weights.shape[-1] * torch.finfo(torch.float32).eps
    if not bool(((off := missing.abs()) <= allowed).all()):  # also where a weight is NaN or infinite
        worst = float(off.nan_to_num(torch.inf).max())
        raise ValueError(
            f"the weights of each query must be finite and sum to 1 − sink_mass, but {int((~(off <= allowed)).sum())} of "
            f"{off.numel()} queries are off, by up to {worst:g}: give probabilities after softmax, over all keys that were read"
        )
    return weights


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite: the extremes tell, and cost a tenth of asking each."""
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor.detach()))


def exact_values(values: Tensor, weights: Tensor) -> Tensor:
    """The values in the dtype of the (exact) weights.

    Raises:
        ValueError: they do not fit the weights, or are not finite.
    """
    heads, kv_heads = weights.shape[-3], values.shape[-3]
    if heads % kv_heads or values.shape[-2] != weights.shape[-1]:
        raise ValueError(
            f"values [{kv_heads} KV heads, {values.shape[-2]} keys] do not fit weights [{heads} heads, {weights.shape[-1]} "
            f"keys]: the heads must be a multiple, the keys equal"
        )
    if not all_finite(values):
        raise ValueError(f"{int((~values.isfinite()).sum())} of {values.numel()} values are not finite")
    return values.to(torch.promote_types(weights.dtype, values.dtype))


def per_head(keep: Tensor, weights: Tensor, sink_mass: Tensor | None = None) -> Tensor:
    """The keep-mask of each query head, [*batch, heads, 1, keys].

    Raises:
        ValueError: it is not boolean, does not fit the weights, or keeps nothing at all where there is no sink either.
    """
    heads, kv_heads = weights.shape[-3], keep.shape[-2]
    if keep.dtype != torch.bool:
        raise ValueError(f"a keep-mask is boolean (True: kept), not {keep.dtype}")
    if heads % kv_heads or keep.shape[-1] != weights.shape[-1]:
        raise ValueError(
            f"keep [{kv_heads} KV heads, {keep.shape[-1]} keys] does not fit weights [{heads} heads, "
            f"{weights.shape[-1]} keys]: the heads must be a multiple, the keys equal"
        )
    nothing = ~keep.any(-1)
    if bool(nothing.any()):
        if sink_mass is not None:  # a sink is what may be left
            nothing = nothing & (sink_mass <= 0).unflatten(-2, (kv_heads, -1)).any(-1).any(-1)
        if bool(nothing.any()):
            raise ValueError(f"{int(nothing.sum())} of {nothing.numel()} KV heads keep no entry at all: keep at least one")
    return keep.repeat_interleave(heads // kv_heads, dim=-2)[..., None, :]


def projection(output_projection: Tensor, values: Tensor, heads: int) -> Tensor:
    """W_O in the dtype of the (exact) values, or its own where that is better.

    Raises:
        ValueError: it is not finite, or its blocks do not fit the heads and the value dimension.
    """
    if output_projection.shape[:2] != (heads, values.shape[-1]):
        raise ValueError(
            f"W_O {tuple(output_projection.shape)} does not fit {heads} heads of value_dim {values.shape[-1]}: one block "
            "[value_dim, model_dim] per head"
        )
    if not all_finite(output_projection):
        raise ValueError(
            f"{int((~output_projection.isfinite()).sum())} of {output_projection.numel()} entries of W_O are not finite"
        )
    return output_projection.to(torch.promote_types(values.dtype, output_projection.dtype))


def finite_gate(gate: Tensor) -> Tensor:
    """The gate, if it is one.

    Raises:
        ValueError: it is not finite.
    """
    if not all_finite(gate):
        raise ValueError(f"{int((~gate.isfinite()).sum())} of {gate.numel()} entries of the gate are not finite")
    return gate


def multiplied(tensor: Tensor, gate: Tensor | None) -> Tensor:
    """The gate's factor, if there is one.

    Raises:
        ValueError: the gate is not finite.
    """
    if gate is None:
        return tensor
    return tensor * finite_gate(gate).to(torch.promote_types(tensor.dtype, gate.dtype))


def finite(result: Tensor, what: str) -> Tensor:
    """The result, if it is one.

    Raises:
        ValueError: it overflowed.
    """
    if not all_finite(result):
        raise ValueError(f"{what} overflows {result.dtype}: the numbers are too large for it; give float64, or rescale them")
    return result


def order_p(norm: float) -> float:
    """p of ‖·‖_p.

    Raises:
        ValueError: p is below 1.
    """
    if not norm >= 1:
        raise ValueError(f"norm must be at least 1 (‖·‖_p is no norm below), not {norm}")
    return norm
