"""What every bound is checked for before it is computed. Shares no code with `perturbation`, which the bounds are held against."""

import torch
from torch import Tensor


def probabilities(weights: Tensor, sink_mass: Tensor | None) -> Tensor:
    """A in float32 or better.

    Raises:
        ValueError: A is not finite, negative, or does not sum to 1 − a0 up to rounding.
    """
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
    if keep.dtype is not torch.bool:
        raise ValueError(f"keep must be boolean, True for an entry that stays; it is {keep.dtype}")
    group, rest = divmod(weights.shape[-3], keep.shape[-2])
    if rest or keep.shape[-1] != weights.shape[-1]:
        raise ValueError(
            f"keep {tuple(keep.shape)} must have one row for each KV head and {weights.shape[-1]} keys, as weights "
            f"{tuple(weights.shape)} have, with a whole number of heads to a KV head"
        )
    gone = ~keep.repeat_interleave(group, dim=-2)[..., None, :]
    alone = gone.all(-1) if sink_mass is None else gone.all(-1) & (sink_mass == 0)
    if bool(alone.any()):
        raise ValueError(f"keep leaves nothing to {int(alone.sum())} heads and queries: keep at least one entry per KV head")
    return gone


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
    if not bool((value_norms >= 0).all() & value_norms.isfinite().all()):
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
    if not bool(values.isfinite().all()):
        raise ValueError(f"{int((~values.isfinite()).sum())} of {values.numel()} values are not finite")
    dtype = torch.promote_types(torch.float32, values.dtype)
    return values.to(dtype), output_projection.to(dtype).unflatten(0, (kv_heads, heads // kv_heads))
