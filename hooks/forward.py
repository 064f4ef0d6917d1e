"""One forward pass on a cache, whatever the installed transformers calls the cache."""

import inspect
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers.cache_utils import Cache


def cache_keyword(model: nn.Module) -> str:
    """`cache`, or `past_key_values` where the installed transformers does not know the new name yet."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def given(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call of the model gives by name, whichever way it gives it."""
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    return {**bound.get("kwargs", {}), **bound}


def cache_given(called: dict[str, Any]) -> Any:
    """The cache that a call (as `given` has it) writes to, under either name; None where there is none."""
    return next((called[name] for name in ("cache", "past_key_values") if called.get(name) is not None), None)


def tokens_given(called: dict[str, Any]) -> Any:
    """The ids or embeddings that a call runs; None where there are none."""
    return next((called[name] for name in ("input_ids", "inputs_embeds") if called.get(name) is not None), None)


def last_places(tokens: Tensor, count: int) -> Int[Tensor, " places"]:
    """Where the last `count` tokens stand. Asked for logits by a number instead, some families run their last layers on those tokens alone."""
    return torch.arange(max(tokens.shape[1] - count, 0), tokens.shape[1], device=tokens.device)


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
    asked = last_places(tokens, last_logits) if last_logits else 0
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
