"""The pipeline end to end: prefill, evict, go on decoding on what is left."""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from eviction.cache import EvictedCache, reading
from eviction.cache.evicted import full_bytes
from eviction.checks import one_of, whole
from eviction.evicting import driving, evicting
from eviction.moments import Moments
from eviction.places import left_padding, require_prompt
from eviction.policy import Policy
from eviction.select import Decision
from hooks.forward import cache_keyword, forward

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Settings of `model.generate` under which it feeds a cached prompt again."""


@dataclass(frozen=True)
class Prefilled:
    """A prompt after prefill and eviction: the cache to go on with, and what was decided.

    `decisions` are those of the layers that hold entries, in order, over all of the prompt. `keep` has one mask for each decoder layer, as
    `hooks.hiding` takes them: that of the layer whose entries it reads, or None where it has no attention. `logits` are those after the
    prompt's last token, before anything was evicted after it. `full_bytes` are those of a cache that holds all of the prompt.
    """

    cache: EvictedCache
    decisions: tuple[Decision, ...]
    keep: tuple[Bool[Tensor, "batch _ prompt"] | None, ...]
    logits: Float[Tensor, "batch 1 vocabulary"]
    full_bytes: int


@torch.no_grad()
def prefill(
    model: nn.Module,
    prompt: Int[Tensor, "batch prompt"],
    policy: Policy,
    budget: int | float,
    *,
    attention_mask: Int[Tensor, "batch prompt"] | Bool[Tensor, "batch prompt"] | None = None,
    chunk_size: int | None = None,
    choose: Literal["each chunk", "at the end"] = "each chunk",
    carry: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Prefilled:
    """Run the prompt once, let `policy` choose in each layer as it passes, and keep only what it chose.

    The evicted cache equals the full one with the same entries masked, up to float rounding (`hooks.hiding` is that reference). Where heads
    or layers keep different numbers of entries the cache is `ragged`, and goes on inside `with eviction.reading(model):`. Layers that read
    another's entries (shared KV) share its decision, on the mean of their scores (the sum, where those are nats).

    Examples:
        >>> from eviction import policy
        >>> found = prefill(model, tokens, policy("snapkv", window=8), 0.5)
        >>> found.cache.entries, found.cache.nbytes < 0.6 * found.full_bytes  # entries a head, of 48
        (24, True)

    Args:
        model: a causal language model of transformers: full, sliding-window, latent and linear attention, or a mixture.
        prompt: tokens; in a batch of different lengths padded on the left.
        policy: what is kept.
        budget: entries per KV head, or a fraction of those that a row has in that layer (pads apart, within a sliding window).
        attention_mask: 0 where a token is a pad. Go on with a mask that covers the prompt's tokens too.
        chunk_size: tokens that are run at a time; None runs all at once.
        choose: "each chunk" evicts after every chunk, so that no more than the budget and a chunk is ever held, and later chunks see what is
            left; "at the end" evicts once, which chooses what a prefill in one piece does.
        carry: let the cache hold on to its last queries, for an `evicting` block that it goes on in.
        progress: called with the tokens that were run so far.

    Raises:
        BudgetError: the budget is outside its range.
        ValueError: there is no token, the mask does not fit or pads on the right, or the chunks have no size.
        UnsupportedAttention: the model's attention or cache cannot be evicted from.
    """
    require_prompt(prompt)
    one_of("choose", choose, "each chunk", "at the end")
    left_padding((prompt.shape[0], prompt.shape[1]), attention_mask)
    length = prompt.shape[1]
    if chunk_size is not None:
        whole("chunk_size", chunk_size, 1)
    cache, logits = DynamicCache(config=model.config), None  # type: ignore[arg-type]
    last: deque[Any] = deque(maxlen=1)
    with driving(model, policy, budget, Moments(), last.append) as evictor:
        for start in range(0, length, chunk_size or length):
            end = min(start + (chunk_size or length), length)
            evictor.choose = choose == "each chunk" or end == length
            mask = None if attention_mask is None else attention_mask[:, :end]
            logits = forward(model, prompt[:, start:end], cache, last_logits=1, attention_mask=mask)
            if progress is not None:
                progress(end)
    assert logits is not None
    evicted = EvictedCache(cache.layers)
    if not carry:
        evicted.forget()
    return Prefilled(evicted, last[-1].decisions, last[-1].keep, logits, full_bytes(evicted))


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompt: Int[Tensor, "batch prompt"],
    policy: Policy,
    budget: int | float,
    when: Moments | None = None,
    **settings: Any,
) -> Any:
    """`model.generate` on a compressed cache: the prompts and what follows them [sequences, tokens], or what settings make it return.

    All of the prompt but its last token is prefilled and evicted; the last token then opens decoding on what is left, since
    `generate` needs one token that is not cached yet. `settings` go to `model.generate` as they are: sampling, beams, a streamer, an
    `attention_mask` over prompts that are padded on the left. With a `prefill_chunk_size` the policy chooses after each chunk; `when` says
    when it chooses besides (`evicting`).

    Raises:
        BudgetError: the budget (a fraction is one of the prompt less one token) is outside its range.
        ValueError: the prompt has fewer than 2 tokens, or settings bring a cache or a configuration of their own, turn the cache off, or
            ask for assisted decoding, which would feed the prompt again.
        UnsupportedAttention: the model's attention or cache cannot be evicted from.
    """
    keyword = cache_keyword(model)
    if clash := sorted({"cache", "past_key_values", "generation_config"} & settings.keys()):
        raise ValueError(f"generate makes its own cache, and takes settings by name; leave out {' and '.join(clash)}")
    for name in ASSISTED:
        if settings.get(name, getattr(model.generation_config, name, None)) is not None:
            raise ValueError(
                f"{name}: assisted decoding feeds the whole prompt again, on top of the compressed one; leave it out"
            )
    if settings.get("use_cache") is False:
        raise ValueError("use_cache=False leaves nothing to compress; leave it out")
    if prompt.shape[1] < 2:
        raise ValueError(f"a prompt of at least 2 tokens is needed, not {prompt.shape[1]}")
    when = when or Moments()
    mask = settings.pop("attention_mask", None)
    mask = torch.ones_like(prompt) if mask is None else mask
    left_padding((prompt.shape[0], prompt.shape[1]), mask)
    settings = {"attention_mask": mask, **settings, "use_cache": True}
    if not when.prefill:
        with evicting(model, policy, budget, when):
            return model.generate(prompt, **settings)  # type: ignore[operator]

    def asked(name: str) -> Any:
        return settings.get(name) or getattr(model.generation_config, name, None)

    chunk_size = asked("prefill_chunk_size")
    evicted = prefill(
        model, prompt[:, :-1], policy, budget, attention_mask=mask[:, :-1], chunk_size=chunk_size, carry=when.every is not None
    ).cache
    sequences = max(asked(name) or 1 for name in ("num_beams", "num_return_sequences"))
    if sequences > 1:  # generate repeats the prompts, and no cache that it is given
        evicted.reorder_cache(torch.arange(prompt.shape[0]).repeat_interleave(sequences))  # type: ignore[arg-type]
    if when.every is not None:
        block: Any = evicting(model, policy, budget, replace(when, prefill=False))
    else:
        block = reading(model) if evicted.ragged else nullcontext()
    with block:
        return model.generate(prompt, **{**settings, keyword: evicted, "prefill_chunk_size": None})  # type: ignore[operator]
