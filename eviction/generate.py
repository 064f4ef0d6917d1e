"""The pipeline end to end: prefill, evict, go on decoding on what is left."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from eviction.allocate import uniform_entries
from eviction.cache import EvictedCache, cache_bytes, reading
from eviction.cache.owner import owner
from eviction.observation import Observation
from eviction.policy import Policy, Scored, merged
from eviction.select import Decision
from hooks.capture import capture
from hooks.dispatch import implementations
from hooks.errors import UnsupportedAttention
from hooks.forward import cache_keyword, forward
from hooks.records import LayerRecord

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Settings of `model.generate` under which it feeds a cached prompt again."""


@dataclass(frozen=True)
class Prefilled:
    """A prompt after prefill and eviction: the cache to go on with, and what was decided.

    `decisions` are those of the layers that hold entries, in order. `keep` has one mask for each decoder layer, as `hooks.hiding` takes
    them: that of the layer whose entries it reads, or None where it has no attention. `logits` are those after the prompt's last token,
    before anything was evicted.
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
) -> Prefilled:
    """Run the prompt once, let `policy` choose in each layer as it passes, and keep only what it chose.

    The evicted cache equals the full one with the same entries masked, up to float rounding (`hooks.hiding` is that reference). Where heads
    or layers keep different numbers of entries the cache is `ragged`, and goes on inside `with eviction.reading(model):`. Layers that read
    another's entries (shared KV) share its decision, on the mean of their scores.

    Args:
        model: a causal language model of transformers: full, sliding-window, latent and linear attention, or a mixture.
        prompt: tokens; in a batch of different lengths padded on the left.
        policy: what is kept.
        budget: entries per KV head, or a fraction of those that a row has in that layer (pads apart, within a sliding window).
        attention_mask: 0 where a token is a pad. Go on with a mask that covers the prompt's tokens too.

    Raises:
        BudgetError: the budget is outside its range.
        ValueError: there is no token, or the mask does not fit or pads on the right.
        UnsupportedAttention: the model's attention or cache cannot be evicted from.
    """
    if not prompt.numel():
        raise ValueError(f"a prompt of at least one token is needed, not tokens {tuple(prompt.shape)}")
    padding = _padding(prompt, attention_mask)
    uniform_entries(budget, torch.tensor([prompt.shape[1]]))  # refused before the work, not after
    _require_places(model)
    cache = DynamicCache(config=model.config)  # type: ignore[arg-type]
    EvictedCache.require_support(cache)
    scored: dict[int, list[Scored]] = {}
    places: dict[int, int] = {}  # decoder layer -> cache layer
    latent: set[int] = set()

    def look(record: LayerRecord) -> None:
        place, expanded = owner(cache, record)
        layer: Any = cache.layers[place]
        if expanded:
            latent.add(place)
        if places.setdefault(record.layer, place) != place or (place in scored and (expanded or place in latent)):
            raise UnsupportedAttention(
                f"decoder layer {record.layer} attends several times in a pass, to entries of its own each time; looped layers cannot be "
                "evicted from"
            )
        seen = Observation(record, cached_heads=layer.keys.shape[1], held=layer.keys.shape[2])
        scored.setdefault(place, []).append(policy.score(seen, budget))

    with capture(model, window=policy.window, visitor=look):
        logits = forward(model, prompt, cache, last_logits=1, attention_mask=None if padding is None else attention_mask)
    owners = sorted(scored)
    decided = dict(zip(owners, policy.decide_all([merged(scored[place]) for place in owners]), strict=True))
    full_bytes = cache_bytes(cache)
    masks = [decided[place].keep if place in decided else None for place in range(len(cache.layers))]
    evicted = EvictedCache.compacted(cache, masks, padding=padding, latent=latent, consume=True)
    return Prefilled(
        evicted,
        tuple(decided.values()),
        tuple(masks[places[layer]] if layer in places else None for layer in range(max(max(places) + 1, len(masks)))),
        logits,
        full_bytes,
    )


def _require_places(model: nn.Module) -> None:
    """Refuse attention whose result depends on where entries lie in memory.

    Raises:
        UnsupportedAttention: ALiBi or a paged kernel.
    """
    config: Any = model.config
    parts = [config, getattr(config, "attn_config", None)]
    if config.model_type == "bloom" or any(getattr(part, "alibi", False) for part in parts):
        raise UnsupportedAttention(
            f"{type(model).__name__} uses ALiBi, whose bias is by the distance of entries in the cache; eviction would change it"
        )
    if getattr(config, "index_topk", None):
        raise UnsupportedAttention(
            f"{type(model).__name__} uses sparse-index attention, which chooses entries by an index of its own; eviction would leave "
            "it pointing at others"
        )
    if paged := sorted(name for name in implementations(model) if name.startswith("paged")):
        raise UnsupportedAttention(
            f"attention '{paged[0]}' keeps entries in pages that heads share; load the model with attn_implementation='sdpa'"
        )


def _padding(prompt: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """True where there is a token; None where that is everywhere."""
    if attention_mask is None:
        return None
    padding = attention_mask.bool()
    if padding.shape != prompt.shape:
        raise ValueError(f"an attention mask {tuple(padding.shape)} does not fit tokens {tuple(prompt.shape)}")
    if not bool((padding == padding.cummax(-1).values).all()) or not bool(padding[:, -1].all()):
        raise ValueError(
            "prompts of different lengths are padded on the left: the attention mask has a 0 after a 1, or a row without tokens"
        )
    return None if bool(padding.all()) else padding


@torch.no_grad()
def generate(
    model: PreTrainedModel, prompt: Int[Tensor, "batch prompt"], policy: Policy, budget: int | float, **settings: Any
) -> Int[Tensor, "sequences tokens"]:
    """`model.generate` on a compressed cache: the prompts and what follows them.

    All of the prompt but its last token is prefilled and evicted; the last token then opens decoding on what is left, since
    `generate` needs one token that is not cached yet. `settings` go to `model.generate` as they are: sampling, beams, an
    `attention_mask` over prompts that are padded on the left.

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
    mask = settings.pop("attention_mask", None)
    mask = torch.ones_like(prompt) if mask is None else mask
    _padding(prompt, mask)
    evicted = prefill(model, prompt[:, :-1], policy, budget, attention_mask=mask[:, :-1]).cache
    asked = [
        settings.get(name) or getattr(model.generation_config, name, None) for name in ("num_beams", "num_return_sequences")
    ]
    if (sequences := max(count or 1 for count in asked)) > 1:  # generate repeats the prompts, and no cache that it is given
        evicted.reorder_cache(torch.arange(prompt.shape[0]).repeat_interleave(sequences))  # type: ignore[arg-type]
    with reading(model) if evicted.ragged else nullcontext():
        return model.generate(prompt, **{"attention_mask": mask, **settings, "use_cache": True, keyword: evicted})  # type: ignore[operator]
