"""What every bound is checked for before it is computed. Shares no code with `perturbation`, which the bounds are held against."""

import torch
from torch import Tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite: the extremes tell, and cost a tenth of asking each."""
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor.detach()))


def common(*tensors: Tensor | None) -> torch.dtype:
    """The dtype that all can be computed in: float32 or better."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def finite(result: Tensor, what: str) -> Tensor:
    """The result, if it is one.

    Raises:
        ValueError: it is not finite, because its inputs are not or are too large.
    """
    if not all_finite(result):
        raise ValueError(
            f"{what} is not finite in {result.dtype}: a gate or reference is not, or numbers are too large for it; give float64, or "
            "rescale them"
        )
    return result


def probabilities(weights: Tensor, sink_mass: Tensor | None) -> Tensor:
    """A in float32 or better.

    Raises:
        ValueError: A is not finite, negative, or does not sum to 1 − a0 up to rounding.
    """
    if torch.is_autocast_enabled(weights.device.type):
        raise ValueError(
            "autocast is on, which would compute this in low precision: call it under torch.autocast(device_type, enabled=False)"
        )
    tolerated = 8 * torch.finfo(weights.dtype).eps
    weights = weights.to(torch.promote_types(torch.float32, weights.dtype))
    if 0 in weights.shape:
        raise ValueError(f"weights {tuple(weights.shape)} are empty")
    total = weights.sum(-1)
    if sink_mass is not None:
        if bool((sink_mass < 0).any()):
            raise ValueError(f"sink_mass must not be negative, but reaches {float(sink_mass.min()):g}")
        total = total + sink_mass.to(weights.dtype)
    tolerated += weights.shape[-1] * torch.finfo(torch.float32).eps  # a softmax in float32, whatever holds it now
    if bool((weights < 0).any()) or not bool(((total - 1).abs() <= tolerated).all()):
        raise ValueError(
            f"weights {tuple(weights.shape)} must be probabilities that sum, with the sink, to 1 for each query; the lowest is "
            f"{float(weights.min()):g}, the sums lie in [{float(total.min()):g}, {float(total.max()):g}]"
        )
    return weights


def evicted(keep: Tensor, weights: Tensor, sink_mass: Tensor | None) -> Tensor:
    """¬N per query head, [*batch, heads, 1, keys].

    Raises:
        ValueError: N is not boolean, does not fit, or is empty for some KV head whose heads have no sink.
    """
    gone = ~chosen(keep, weights)
    alone = gone.all(-1) if sink_mass is None else gone.all(-1) & (sink_mass == 0)
    if bool(alone.any()):
        raise ValueError(f"keep leaves nothing to {int(alone.sum())} heads and queries: keep at least one entry per KV head")
    return gone


def chosen(mask: Tensor, weights: Tensor) -> Tensor:
    """A mask per KV head as one per query head, [*batch, heads, 1, keys].

    Raises:
        ValueError: it is not boolean, or does not fit.
    """
    if mask.dtype is not torch.bool:
        raise ValueError(f"a mask of entries must be boolean, True for one that stays; it is {mask.dtype}")
    group, rest = divmod(weights.shape[-3], mask.shape[-2])
    if rest or mask.shape[-1] != weights.shape[-1]:
        raise ValueError(
            f"keep {tuple(mask.shape)} must have one row for each KV head and {weights.shape[-1]} keys, as weights "
            f"{tuple(weights.shape)} have, with a whole number of heads to a KV head"
        )
    return mask.repeat_interleave(group, dim=-2)[..., None, :]


def sizes(value_norms: Tensor, weights: Tensor) -> Tensor:
    """‖ν‖ in the dtype that A and ‖ν‖ are computed in.

    Raises:
        ValueError: the norms do not fit A, are negative or not finite.
    """
    shape = (weights.shape[-3], weights.shape[-1])
    if (value_norms.shape[-3], value_norms.shape[-1]) != shape or value_norms.shape[-2] not in (1, weights.shape[-2]):
        raise ValueError(
            f"value_norms {tuple(value_norms.shape)} must have the heads and keys of weights {tuple(weights.shape)}, and 1 query "
            "or as many"
        )
    if not (all_finite(value_norms) and bool(value_norms.amin() >= 0)):
        raise ValueError("value_norms are norms: finite and not negative; make them with bounds.projected_norms")
    return value_norms.to(torch.promote_types(weights.dtype, value_norms.dtype))


def spread(values: Tensor, output_projection: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """V, and W_O as [kv_heads, group, value_dim, model_dim], in float32 or better.

    Raises:
        ValueError: they do not fit each other, the values are not finite, or `norm` is below 1.
    """
    heads, value_dim, _ = output_projection.shape
    kv_heads = values.shape[-3]
    if heads % kv_heads or values.shape[-1] != value_dim:
        raise ValueError(
            f"values [{kv_heads} KV heads, value_dim {values.shape[-1]}] do not fit W_O [{heads} heads, value_dim "
            f"{value_dim}]: the heads must be a multiple, value_dim equal"
        )
    if not norm >= 1:
        raise ValueError(f"norm must be at least 1 (‖·‖_p is no norm below), not {norm}")
    for name, tensor in (("values", values), ("entries of W_O", output_projection)):
        if not all_finite(tensor):
            raise ValueError(f"{int((~tensor.isfinite()).sum())} of {tensor.numel()} {name} are not finite")
    dtype = common(values, output_projection)
    return values.to(dtype), output_projection.to(dtype).unflatten(0, (kv_heads, heads // kv_heads))


def triangular(blocks: Tensor) -> Tensor:
    """Rᵀ such that ‖v W‖₂ = ‖v Rᵀ‖₂ for each block W [value_dim, model_dim]: what an L2 norm needs of W.

    The triangular factor of Wᵀ = Q R (Q has orthonormal columns). In float32 it is the Cholesky factor of the Gram matrix W Wᵀ
    in float64, whose rounding, the root of float64's, is below float32's own; where that matrix is singular, and in float64, it
    is made by QR.
    """
    if blocks.dtype == torch.float32 and blocks.shape[-2] <= blocks.shape[-1]:
        exact = blocks.double()
        factor, failed = torch.linalg.cholesky_ex(exact @ exact.mT)
        if not bool(failed.any()):
            return factor.to(blocks.dtype)
    return torch.linalg.qr(blocks.mT, mode="r").R.mT
