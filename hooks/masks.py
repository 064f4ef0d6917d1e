"""What a query could see: the mask that an attention call applied, written out for its last queries, whatever its form."""

from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from hooks.dispatch import AttentionCall
from hooks.errors import UnsupportedAttention


def over_keys(keep: Bool[Tensor, "*batch entries"], seen: int, keys: int) -> Bool[Tensor, "*batch keys"]:
    """A keep-mask over the first entries, over the `keys` that attention reads after `seen` tokens.

    What was written after the mask was made stays; a sliding window's cache has dropped the first ones.
    """
    later = keep.new_ones(*keep.shape[:-1], seen - keep.shape[-1])
    return torch.cat([keep, later], -1)[..., seen - keys :]


def visible(call: AttentionCall, queries: int | None = None) -> Tensor:
    """The mask of the call's last `queries` queries: [1 or batch, 1 or heads, queries, keys].

    Boolean (True: visible), or additive where attention added something to its logits (an additive mask, a position bias). A
    mask that is not there is written out as the kernel applies it: eager attention sees everything; sdpa is causal for several
    queries, aligned at the upper left; flash attention is causal, aligned at the lower right, within its sliding window and
    the padding mask.

    Raises:
        UnsupportedAttention: the mask is of a form that is not known.
    """
    total, keys = call.query.shape[2], call.key.shape[2]
    count = total if queries is None else min(queries, total)
    mask = _rows(call, count, total, keys)
    bias = call.options.get("position_bias")
    if bias is None:
        return mask
    bias = bias[:, :, -count:, :keys] if bias.shape[2] > 1 else bias[..., :keys]
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return mask + bias


def seen(mask: Tensor) -> Tensor:
    """Where a boolean or additive mask lets through."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def adds(mask: Tensor) -> bool:
    """Whether a mask adds something to what it lets through (a position bias); most only hide."""
    return mask.dtype != torch.bool and bool((mask.masked_fill(~seen(mask), 0) != 0).any())


def masked(logits: Tensor, mask: Tensor) -> Tensor:
    """`logits` with a boolean (True: visible) or additive mask; what is hidden gets the lowest number, so that a row of nothing is finite."""
    lowest = torch.finfo(logits.dtype).min
    if mask.dtype == torch.bool:
        return logits.masked_fill(~mask, lowest)
    return (logits + mask.to(logits.dtype)).clamp(min=lowest)


def restricted(call: AttentionCall, mask: Tensor, there: Tensor) -> AttentionCall:
    """The call with `mask`, as `visible` writes it out, less what is not `there`, in the form that sdpa or eager attention takes.

    A position bias is in the mask then, and is not given beside it.
    """
    options = {name: value for name, value in call.options.items() if name != "position_bias"}
    if mask.dtype == torch.bool and call.implementation != "eager":
        return replace(call, mask=mask & there, options=options)
    lowest = torch.finfo(call.query.dtype).min
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=call.query.dtype).masked_fill(~mask, lowest)
    return replace(call, mask=mask.masked_fill(~there, lowest), options=options)


def _rows(call: AttentionCall, count: int, total: int, keys: int) -> Tensor:
    mask, device = call.mask, call.query.device
    if call.implementation.startswith("flash"):
        return _flash(call, count, keys)
    if mask is None:
        asked = call.options.get("is_causal")
        causal = asked if asked is not None else getattr(call.module, "is_causal", True)
        if total == 1 or not causal or call.implementation == "eager":
            return torch.ones(1, 1, count, keys, dtype=torch.bool, device=device)
        rows = torch.arange(total - count, total, device=device)
        return (torch.arange(keys, device=device) <= rows[:, None])[None, None]
    if isinstance(mask, BlockMask):
        first, inside = total - count, mask.mask_mod
        batch, heads = mask.shape[:2]
        return create_mask(lambda b, h, q, k: inside(b, h, q + first, k), batch, heads, count, keys, device=str(device))
    if isinstance(mask, Tensor) and mask.dim() == 4:
        if mask.shape[2] > 1 or total == 1:
            mask = mask[:, :, -count:]
        return mask[..., :keys]
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedAttention(
        f"{type(call.module).__name__} was called with the attention mask {shape} under '{call.implementation}'; a mask tensor "
        "[batch, heads, queries, keys] or a BlockMask is needed: load the model with attn_implementation='sdpa' or 'eager'"
    )


def _flash(call: AttentionCall, count: int, keys: int) -> Tensor:
    device = call.query.device
    asked = call.options.get("is_causal")
    causal = asked if asked is not None else getattr(call.module, "is_causal", True)
    rows = torch.arange(keys - count, keys, device=device)[:, None]
    columns = torch.arange(keys, device=device)
    seen = columns <= rows if causal else torch.ones(count, keys, dtype=torch.bool, device=device)
    window = call.options.get("sliding_window")
    if window is not None:
        seen = seen & (rows - columns < window)
    if not isinstance(call.mask, Tensor):
        return seen[None, None]
    return seen[None, None] & call.mask[:, None, None, -keys:].bool()
