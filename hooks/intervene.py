"""Change what attention sees, without changing the cache: the masked reference that every compressed cache must equal."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from hooks.dispatch import AttentionCall, AttentionResult, Proceed, intercept
from hooks.errors import UnsupportedAttention
from hooks.masks import visible


@contextmanager
def hiding(model: nn.Module, keep: Sequence[Bool[Tensor, "batch kv_heads prompt"] | None]) -> Iterator[None]:
    """Inside the `with` block, attention does not see the entries that `keep` (one mask per layer) leaves out.

    `keep[l][b, k, i]` says whether entry i of KV head k in layer l stays visible to row b; a mask with one head is for all of them (latent
    attention caches one). Entries beyond the masks, those written after the prompt, stay visible. Attention renormalises over what it
    sees, which is eviction without freeing memory. The cache itself is untouched; it must hold the whole prompt, so that the layers of a
    sliding window need `DynamicCache()` without a config, which drops nothing. Layers are counted by the attention modules' `layer_idx`;
    those without attention have None.

    Raises:
        ValueError: a mask does not fit the batch, the KV heads or the length of the keys; or there is no mask for a layer.
    """

    def hide(call: AttentionCall, proceed: Proceed) -> AttentionResult:
        if call.implementation not in ("sdpa", "eager"):
            raise UnsupportedAttention(
                f"entries cannot be hidden per head under '{call.implementation}', whose mask is the same for every head; load the model with "
                "attn_implementation='sdpa' or 'eager'"
            )
        layer = int(call.module.layer_idx)  # type: ignore[arg-type]
        if layer >= len(keep):
            raise ValueError(f"layer {layer} calls attention, but there are only {len(keep)} keep-masks")
        batch, heads = call.query.shape[:2]
        kv_heads, keys = call.key.shape[1:3]
        chosen = keep[layer]
        if chosen is None:
            raise ValueError(f"layer {layer} calls attention, but its keep-mask is None")
        if chosen.shape[0] != batch or chosen.shape[1] not in (1, kv_heads) or chosen.shape[2] > keys:
            raise ValueError(
                f"layer {layer}: a keep-mask {tuple(chosen.shape)} does not fit keys [batch {batch}, KV heads {kv_heads}, "
                f"keys {keys}]; a sliding window that has dropped some needs a DynamicCache() without a config"
            )
        chosen = chosen.expand(-1, kv_heads, -1)
        later = chosen.new_ones(batch, kv_heads, keys - chosen.shape[2])
        seen = torch.cat([chosen, later], dim=2).repeat_interleave(heads // kv_heads, dim=1)[:, :, None]
        mask = visible(call)  # a position bias is in it now, and must not be added twice
        call = replace(call, options={name: value for name, value in call.options.items() if name != "position_bias"})
        if mask.dtype == torch.bool and call.implementation != "eager":
            return proceed(replace(call, mask=mask & seen))
        lowest = torch.finfo(call.query.dtype).min
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=call.query.dtype).masked_fill(~mask, lowest)
        return proceed(replace(call, mask=mask.masked_fill(~seen, lowest)))

    with intercept(model, hide):
        yield
