"""One forward pass on a cache, whatever the installed transformers calls the cache."""

import inspect
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache


def cache_keyword(model: nn.Module) -> str:
    """`cache`, or `past_key_values` where the installed transformers does not know the new name yet."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def given(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call of the model gives by name, whichever way it gives it."""
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    return {**bound.get("kwargs", {}), **bound}


def forward(
    model: nn.Module,
    tokens: Int[Tensor, "batch tokens"],
    cache: Cache,
    *,
    last_logits: int = 0,
    attention_mask: Shaped[Tensor, "batch seen"] | None = None,
) -> Float[Tensor, "batch logits vocabulary"]:
    """Run `tokens` through the model on top of `cache`, which they are written to, and return logits.

    `last_logits` asks for the logits of so many last tokens; 0 for those of all. `attention_mask` is 0 at pads, over the tokens that the cache
    has seen and these; positions count the others.
    """
    asked: int | Tensor = last_logits
    if last_logits:  # by their places: asked for a number of them, some families run their last layers on those tokens alone
        asked = torch.arange(max(tokens.shape[1] - last_logits, 0), tokens.shape[1], device=tokens.device)
    more: dict[str, Any] = {cache_keyword(model): cache}
    if attention_mask is not None:
        more["attention_mask"] = attention_mask
        if "position_ids" in inspect.signature(model.forward).parameters:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            more["position_ids"] = positions[:, -tokens.shape[1] :]
    output: Any = model(input_ids=tokens, use_cache=True, logits_to_keep=asked, **more)
    return cast(Tensor, output.logits)[:, -last_logits:]  # some families give those of all tokens whatever is asked for


def greedy(model: nn.Module, first: Int[Tensor, "batch 1"], cache: Cache, count: int) -> Int[Tensor, "batch count"]:
    """`first` and the count − 1 likeliest tokens that follow it, each decoded on top of `cache`.

    The last one is returned but not written to the cache.
    """
    tokens = [first]
    for _ in range(count - 1):
        tokens.append(forward(model, tokens[-1], cache, last_logits=1).argmax(-1))
    return torch.cat(tokens, dim=1)


def crop(cache: DynamicCache, length: int) -> None:
    """Take back what was written to `cache` beyond its first `length` tokens."""
    extra = cache.get_seq_length() - length
    if extra > 0:
        cache.crop(-extra)
