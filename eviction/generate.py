"""The pipeline end to end: prefill, evict, go on decoding on what is left."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from eviction.allocate import uniform_entries
from eviction.cache import EvictedCache, cache_bytes, reading
from eviction.policy import Policy, Scored
from eviction.select import Decision
from hooks.capture import capture
from hooks.forward import cache_keyword, forward
from hooks.records import LayerRecord


@dataclass(frozen=True)
class Prefilled:
    """A prompt after prefill and eviction: the cache to go on with, and what was decided in each layer.

    `logits` are those after the prompt's last token, before anything was evicted.
    """

    cache: EvictedCache
    decisions: tuple[Decision, ...]
    logits: Float[Tensor, "batch 1 vocabulary"]
    full_bytes: int


@torch.inference_mode()
def prefill(model: nn.Module, prompt: Int[Tensor, "batch prompt"], policy: Policy, budget: int | float) -> Prefilled:
    """Run the prompt once, let `policy` choose in each layer as it passes, and keep only what it chose.

    For a batch of one and models whose layers all attend to everything. The evicted cache equals the full one with the
    same entries masked, up to float rounding (`hooks.hiding` is that reference). Where heads or layers keep different numbers of
    entries the cache is `ragged`, and goes on inside `with eviction.reading(model):`.

    Raises:
        BudgetError: the budget is outside its range.
        ValueError: the prompt is not one row.
        UnsupportedAttention: the model's attention or cache cannot be evicted from.
    """
    if prompt.shape[0] != 1:
        raise ValueError(f"prefill takes one prompt at a time, not a batch of {prompt.shape[0]}")
    uniform_entries(budget, torch.tensor([prompt.shape[1]]))  # refused before the work, not after
    cache = DynamicCache(config=model.config)  # type: ignore[arg-type]
    EvictedCache.require_support(cache)
    scored: list[Scored] = []

    def look(record: LayerRecord) -> None:
        scored.append(policy.score(record, budget))

    with capture(model, window=policy.window, visitor=look):
        logits = forward(model, prompt, cache, last_logits=1)
    decisions = policy.decide_all(scored)
    held = cache_bytes(cache)
    evicted = EvictedCache.compacted(cache, [decision.keep for decision in decisions], consume=True)
    return Prefilled(evicted, tuple(decisions), logits, held)


@torch.inference_mode()
def generate(
    model: PreTrainedModel, prompt: Int[Tensor, "batch prompt"], policy: Policy, budget: int | float, **settings: object
) -> Int[Tensor, "sequences tokens"]:
    """`model.generate` on a compressed cache: the prompt and what follows it.

    All of the prompt but its last token is prefilled and evicted; the last token then opens decoding on what is left, since
    `generate` needs one token that is not cached yet. `settings` go to `model.generate` as they are.

    Raises:
        BudgetError: the budget (a fraction is one of the prompt less one token) is outside its range.
        ValueError: the prompt is not one row of at least 2 tokens, or `settings` brings a cache of its own.
    """
    keyword = cache_keyword(model)
    if clash := sorted({"cache", "past_key_values"} & settings.keys()):
        raise ValueError(f"generate makes its own cache; leave out {' and '.join(clash)}")
    if prompt.shape[1] < 2:
        raise ValueError(f"a prompt of at least 2 tokens is needed, not {prompt.shape[1]}")
    asked = [
        settings.get(name) or getattr(model.generation_config, name, None) or 1
        for name in ("num_beams", "num_return_sequences")
    ]
    if (several := [count for count in asked if count != 1]) or "generation_config" in settings:
        raise ValueError(
            f"generate decodes one sequence on the compressed cache; leave out num_beams and num_return_sequences ({several}), give settings "
            "by name instead of a generation_config"
        )
    evicted = prefill(model, prompt[:, :-1], policy, budget).cache
    mask = torch.ones_like(prompt)
    with reading(model) if evicted.ragged else nullcontext():
        return model.generate(prompt, **{"attention_mask": mask, **settings, keyword: evicted})  # type: ignore[operator]
