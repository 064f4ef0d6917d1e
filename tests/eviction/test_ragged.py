"""Different numbers of entries per head and layer: stored flat, read head by head, equal to the masked full cache."""

import pytest
import torch
from models import prompt, tiny
from transformers.cache_utils import DynamicCache

from eviction import EvictedCache, cache_bytes, generate, policy, prefill, reading
from hooks import UnsupportedAttention, hiding
from hooks.dispatch import is_intercepted
from hooks.forward import forward

SETTINGS = {"window": 4, "kernel": 3}
SCORES = {"scores": tuple((1.0 + layer, 3.0) for layer in range(3))}
POLICIES = [
    policy("adakv", **SETTINGS),
    policy("adakv+two-stage", rule="forced", **SETTINGS),
    policy("pyramidkv+norm", beta=3, **SETTINGS),
    policy("headkv+two-stage", **SCORES, **SETTINGS),
    policy("global+centred", floor=0.0, **SETTINGS),
    policy("layer-defensivekv", **SETTINGS),
]
FAMILIES = [("llama", "sdpa"), ("llama", "eager"), ("qwen3", "sdpa"), ("gpt2", "sdpa"), ("phi", "eager")]


@torch.no_grad()
@pytest.mark.parametrize("chosen", POLICIES, ids=lambda chosen: chosen.name)
@pytest.mark.parametrize(("family", "attention"), FAMILIES)
def test_decoding_on_a_ragged_cache_equals_masked_decoding_at_every_step(chosen, family, attention):
    if family in ("gpt2", "phi") and chosen.name.startswith("headkv"):
        chosen = policy(chosen.name, **{**SCORES, "scores": tuple((1.0, 3.0, 2.0, 0.0) for _ in range(3))}, **SETTINGS)
    model, tokens = tiny(family, attention, dtype=torch.float64), prompt(40)
    prefilled = prefill(model, tokens, chosen, 0.3)
    counts = torch.stack([decision.keep.sum(-1) for decision in prefilled.decisions])
    assert prefilled.cache.ragged
    assert counts.unique().numel() > 1
    assert int(counts.sum()) == 12 * counts.numel()
    full = DynamicCache(config=model.config)
    forward(model, tokens, full)
    keep = [decision.keep for decision in prefilled.decisions]
    allowed = 1e-10 if attention == "sdpa" else 1e-5  # eager attention casts its softmax to float32
    for step in (prompt(1, seed=1), prompt(3, seed=2), prompt(1, seed=3)):  # one token, several, one again
        with reading(model):
            evicted_logits = forward(model, step, prefilled.cache)
        with hiding(model, keep):
            masked_logits = forward(model, step, full)
        torch.testing.assert_close(evicted_logits, masked_logits, rtol=allowed, atol=allowed)
    assert prefilled.cache.get_seq_length() == full.get_seq_length() == 45


@torch.no_grad()
def test_the_bytes_held_are_the_bytes_kept():
    model, tokens = tiny("llama"), prompt(40)
    prefilled = prefill(model, tokens, POLICIES[0], 0.3)
    assert prefilled.full_bytes == 3 * 2 * (2 * 40 * 8) * 4
    kept = sum(int(decision.keep.sum()) for decision in prefilled.decisions)
    assert prefilled.cache.nbytes == 2 * kept * 8 * 4 + kept * 4  # keys and values, and where each stood
    assert prefilled.cache.entries == 12


@torch.no_grad()
def test_kept_entries_are_the_chosen_ones_in_order():
    model, tokens = tiny("llama"), prompt(40)
    full = DynamicCache(config=model.config)
    forward(model, tokens, full)
    prefilled = prefill(model, tokens, POLICIES[0], 0.4)
    for layer, kept, decision in zip(full.layers, prefilled.cache.layers, prefilled.decisions, strict=True):
        for head in range(2):
            where = decision.keep[0, head]
            span = kept.spans[0][head]
            assert torch.equal(kept.kept_keys[span], layer.keys[0, head, where])
            assert torch.equal(kept.kept_values[span], layer.values[0, head, where])


@torch.no_grad()
def test_generate_decodes_on_a_ragged_cache_and_leaves_nothing():
    model, tokens = tiny("llama", dtype=torch.float64), prompt(40)
    answer = generate(model, tokens, POLICIES[1], 0.5, max_new_tokens=6, do_sample=False, eos_token_id=None)
    keep = [decision.keep for decision in prefill(model, tokens[:, :-1], POLICIES[1], 0.5).decisions]
    full = DynamicCache(config=model.config)
    forward(model, tokens[:, :-1], full)
    token, expected = tokens[:, -1:], []
    with hiding(model, keep):
        for _ in range(6):
            token = forward(model, token, full).argmax(-1)
            expected.append(token)
    assert torch.equal(answer[:, 40:], torch.cat(expected, 1))
    assert not is_intercepted(model)


@torch.no_grad()
def test_two_conversations_on_one_model_do_not_mix():
    model = tiny("llama", dtype=torch.float64)
    first, second = prompt(40, seed=5), prompt(30, seed=6)
    one, other = prefill(model, first, POLICIES[0], 0.4).cache, prefill(model, second, POLICIES[4], 0.4).cache
    alone = prefill(model, first, POLICIES[0], 0.4).cache
    with reading(model):
        mixed = []
        for seed in range(3):
            mixed.append(forward(model, prompt(1, seed=seed), one))
            forward(model, prompt(2, seed=seed + 9), other)
        apart = [forward(model, prompt(1, seed=seed), alone) for seed in range(3)]
    for got, expected in zip(mixed, apart, strict=True):
        assert torch.equal(got, expected)


@torch.no_grad()
def test_outside_of_reading_a_ragged_cache_is_refused_not_read_wrongly():
    model = tiny("llama")
    cache = prefill(model, prompt(40), POLICIES[0], 0.4).cache
    with pytest.raises(UnsupportedAttention, match=r"with eviction\.reading"):
        forward(model, prompt(1), cache)


@torch.no_grad()
def test_a_ragged_cache_takes_back_tokens_and_refuses_what_it_cannot_do():
    model = tiny("llama", dtype=torch.float64)
    cache = prefill(model, prompt(40), POLICIES[0], 0.4).cache
    with reading(model):
        first = forward(model, prompt(3, seed=1), cache)
        cache.crop(-3)
        torch.testing.assert_close(forward(model, prompt(3, seed=1), cache), first)
    with pytest.raises(ValueError, match="only 3 were written after the eviction"):
        cache.crop(-4)
    with pytest.raises(RuntimeError, match="cannot be reset"):
        cache.reset()


@torch.no_grad()
def test_rows_of_a_batch_may_keep_different_numbers():
    model = tiny("llama", dtype=torch.float64)
    tokens = prompt(20, batch=2)
    full = DynamicCache(config=model.config)
    forward(model, tokens, full)
    generator = torch.Generator().manual_seed(0)
    keep = [torch.rand(2, 2, 20, generator=generator) < share for share in (0.3, 0.5, 0.7)]
    for mask in keep:
        mask[..., 0] = True
    evicted = EvictedCache.compacted(full, keep)
    step = prompt(2, batch=2, seed=3)
    with reading(model):
        got = forward(model, step, evicted)
    with hiding(model, keep):
        torch.testing.assert_close(got, forward(model, step, full), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_compacting_may_consume_the_full_cache_layer_by_layer():
    model, cache = tiny("llama"), DynamicCache()
    forward(model, prompt(10), cache)
    EvictedCache.compacted(cache, [torch.ones(1, 2, 10, dtype=torch.bool)] * 3, consume=True)
    assert cache_bytes(cache) == 0


@torch.no_grad()
def test_attention_caps_and_sinks_on_a_ragged_layer_are_those_of_the_softmax():
    """By hand: soft-cap and learned sinks, which no model of full attention here has together."""
    from hooks.dispatch import AttentionCall
    from perturbation import attention_output, attention_weights

    keys, values = torch.randn(1, 2, 9, 4).double(), torch.randn(1, 2, 9, 4).double()
    keep = torch.rand(1, 2, 6) < 0.5
    keep[..., 0] = True
    from eviction.cache import RaggedLayer
    from eviction.cache.reading import read

    layer = RaggedLayer(keys[:, :, :6], values[:, :, :6], keep)
    layer.update(keys[:, :, 6:], values[:, :, 6:])
    query, sinks = torch.randn(1, 4, 2, 4).double(), torch.randn(4).double()
    causal = torch.tensor([[True, True, False], [True, True, True]])[None, None]
    options = {"scaling": 0.7, "softcap": 2.0, "s_aux": sinks}
    causal = torch.cat([torch.ones(1, 1, 2, 6, dtype=torch.bool), causal], -1)  # over all slots
    got, _ = read(AttentionCall(torch.nn.Identity(), query, layer.keys, layer.values, causal, "eager", options), layer)
    kept = keep.repeat_interleave(2, 1)[:, :, None].expand(-1, -1, 2, -1)
    mask = torch.cat([kept, causal[..., 6:].expand(1, 4, 2, 3)], -1)
    weights, _ = attention_weights(query, keys, scale=0.7, mask=mask, softcap=2.0, sinks=sinks)
    torch.testing.assert_close(got, attention_output(weights, values).transpose(1, 2))
