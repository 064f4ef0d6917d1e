"""Attention probabilities, from queries and keys as attention used them."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


def attention_weights(
    queries: Float[Tensor, "batch heads queries head_dim"],
    keys: Float[Tensor, "batch kv_heads keys head_dim"],
    *,
    scale: float,
    mask: Shaped[Tensor, "#batch #heads queries keys"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | Float[Tensor, "batch heads queries"] | None = None,
) -> tuple[Float[Tensor, "batch heads queries keys"], Float[Tensor, "batch heads queries"]]:
    """A = softmax(softcap(scale · Q Kᵀ) + mask [, sink]) and the mass a0 that fell on the sink.

    Computed in float32, or in float64 where the inputs are float64. `mask` is boolean (True: visible) or additive;
    softcap(x) = c · tanh(x / c). A learned sink is one more logit per head (or per head and query) that no entry answers to: the weights of a
    query sum to 1 − a0. Without sinks a0 is 0.

    Raises:
        ValueError: heads is no multiple of kv_heads, or a query sees no entry at all.
    """
    heads, kv_heads = queries.shape[1], keys.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide evenly over {kv_heads} KV heads")
    dtype = torch.promote_types(torch.float32, queries.dtype)
    grouped = queries.to(dtype).unflatten(1, (kv_heads, heads // kv_heads))
    logits = torch.einsum("bkgtd,bknd->bkgtn", grouped, keys.to(dtype)).flatten(1, 2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        blind = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
        if bool(blind.all(-1).any()):
            raise ValueError("a query sees no entry at all (its row of the mask hides every key), so it has no weights")
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask, -torch.inf)
        else:
            logits = (logits + mask.to(dtype)).masked_fill(blind, -torch.inf)
    if sinks is None:
        return logits.softmax(-1), logits.new_zeros(logits.shape[:-1])
    extra = sinks.to(dtype)
    extra = (extra[None, :, None] if extra.dim() == 1 else extra)[..., None].expand(*logits.shape[:-1], 1)
    weights = torch.cat([logits, extra], dim=-1).softmax(-1)
    return weights[..., :-1], weights[..., -1]
