"""Every policy on every kind of attention: decoding on what was kept equals the model's own cache with the rest masked."""

import pytest
import torch
from kinds import KINDS, LATEST, latest, model, named, owners, refuses, small_model
from models import prompt
from safetensors.torch import load_file
from transformers.cache_utils import DynamicCache

from eviction import EvictedCache, names, prefill, reading
from eviction.cache import RaggedLayer
from hooks import UnsupportedAttention, hiding
from hooks.forward import forward
from hooks.tiny import tiny_model

NAMES = names() if LATEST else names()[::7]  # on the lowest transformers most bases and every suffix once or more


def tolerance(kind: str) -> float:
    return 1e-10 if KINDS[kind][1] == "sdpa" else 1e-6  # eager attention casts its softmax to float32


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_decoding_on_what_was_kept_equals_the_models_cache_with_the_rest_masked(name, kind):
    chosen = named(name, owners(kind)) if "headkv" in name else named(name)
    tokens, allowed = prompt(40), tolerance(kind)
    if refuses(name, kind):
        with pytest.raises(UnsupportedAttention, match=r"linear state|more than one hidden state|read the same entries"):
            prefill(model(kind), tokens, chosen, 0.4)
        return
    prefilled = prefill(model(kind), tokens, chosen, 0.4)
    full = DynamicCache(config=model(kind).config)
    assert prefilled.logits.equal(forward(model(kind), tokens, full, last_logits=1))
    assert all(decision.keep.any(-1).all() for decision in prefilled.decisions)
    assert any(not decision.keep[..., -7:].all() or not decision.keep.all() for decision in prefilled.decisions)
    for step in (prompt(1, seed=1), prompt(3, seed=2), prompt(9, seed=3), prompt(1, seed=4)):  # 9: beyond a window
        with reading(model(kind)):
            evicted = forward(model(kind), step, prefilled.cache)
        with hiding(model(kind), prefilled.keep):
            masked = forward(model(kind), step, full)
        torch.testing.assert_close(evicted, masked, rtol=allowed, atol=allowed)
    assert prefilled.cache.get_seq_length() == full.get_seq_length() == 54


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_evicted_would_have_been_seen(kind):
    """The equality above could hold if nothing that counts were evicted."""
    prefilled, full = prefill(model(kind), prompt(40), named("adakv"), 0.2), DynamicCache(config=model(kind).config)
    forward(model(kind), prompt(40), full)
    with reading(model(kind)):
        evicted = forward(model(kind), prompt(1, seed=1), prefilled.cache)
    assert (evicted - forward(model(kind), prompt(1, seed=1), full)).abs().max() > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1.0, 40, 1000])
def test_a_budget_of_everything_is_the_full_cache_bit_for_bit(kind, budget):
    prefilled, full = (
        prefill(model(kind), prompt(40), named("adakv+two-stage"), budget),
        DynamicCache(config=model(kind).config),
    )
    forward(model(kind), prompt(40), full)
    assert not prefilled.cache.ragged
    for step in (prompt(1, seed=1), prompt(3, seed=2), prompt(1, seed=3)):
        assert torch.equal(forward(model(kind), step, prefilled.cache), forward(model(kind), step, full))


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_contexts_of_1_to_40_tokens_never_leave_an_empty_cache(name):
    chosen = named(name, 2)
    small = small_model()
    for length in range(1, 41):
        budget = (1, 0.05, 0.5)[length % 3]
        prefilled = prefill(small, prompt(length, seed=length), chosen, budget)
        counts = torch.stack([decision.keep.sum(-1) for decision in prefilled.decisions])
        entries = budget if isinstance(budget, int) else max(1, int(budget * length + 0.5))
        assert (counts >= 1).all()
        assert int(counts.sum()) == entries * counts.numel()
    chosen = named(name, 4, 2)
    for length in (1, 7, 8, 20):  # around a window of 8, of which 7 are held
        prefilled = prefill(model("sliding and full"), prompt(length, seed=length), chosen, 0.3)
        for decision in prefilled.decisions[::2]:
            assert (decision.keep[..., -7:].sum(-1) >= 1).all()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_cache_is_the_same_cache(kind, tmp_path):
    allowed = tolerance(kind)
    for name in ("adakv", "snapkv"):
        cache = prefill(model(kind), prompt(40), named(name), 0.4).cache
        with reading(model(kind)):
            forward(model(kind), prompt(3, seed=1), cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = EvictedCache.load(tmp_path / "cache.safetensors")
        assert (loaded.nbytes, loaded.entries, loaded.ragged) == (cache.nbytes, cache.entries, cache.ragged)
        loaded.save(tmp_path / "again.safetensors")
        saved, again = load_file(tmp_path / "cache.safetensors"), load_file(tmp_path / "again.safetensors")
        assert saved.keys() == again.keys()
        assert all(again[key].equal(value) and again[key].dtype == value.dtype for key, value in saved.items())
        with reading(model(kind)):  # close, not equal: products round by where a tensor lies in memory
            for step in (prompt(1, seed=2), prompt(9, seed=3)):
                expected = forward(model(kind), step, cache)
                torch.testing.assert_close(forward(model(kind), step, loaded), expected, rtol=allowed, atol=allowed)


@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("full", "learned positions")])
def test_two_conversations_do_not_mix(kind):
    one, alone = (prefill(model(kind), prompt(40), named("adakv"), 0.4).cache for _ in range(2))
    other = prefill(model(kind), prompt(30, seed=6), named("global+norm"), 0.4).cache
    with reading(model(kind)):
        for seed in range(3):
            mixed = forward(model(kind), prompt(1, seed=seed), one)
            forward(model(kind), prompt(2, seed=seed + 9), other)
            assert torch.equal(mixed, forward(model(kind), prompt(1, seed=seed), alone))


@latest
@torch.no_grad()
def test_a_latent_cache_holds_one_head_and_each_entry_is_judged_over_all_heads():
    prefilled = prefill(model("latent"), prompt(40), named("adakv"), 0.4)
    assert [tuple(decision.keep.shape) for decision in prefilled.decisions] == [(1, 1, 40)] * 4
    assert prefilled.cache.entries == 16


@latest
@torch.no_grad()
def test_outside_of_reading_a_ragged_latent_cache_is_refused_not_read_wrongly():
    prefilled = prefill(model("latent"), prompt(40), named("global+norm"), 0.4)
    assert prefilled.cache.ragged
    assert all(layer.latent for layer in prefilled.cache.layers if isinstance(layer, RaggedLayer))
    with pytest.raises(UnsupportedAttention, match=r"with eviction\.reading"):
        forward(model("latent"), prompt(1), prefilled.cache)


@torch.no_grad()
def test_layers_that_read_anothers_entries_share_its_decision():
    prefilled = prefill(model("shared KV, sliding"), prompt(40), named("snapkv"), 0.4)
    assert len(prefilled.decisions) == 2
    assert len(prefilled.keep) == 4
    assert prefilled.keep[2] is prefilled.keep[0]
    assert prefilled.keep[3] is prefilled.keep[1]


@torch.no_grad()
def test_a_sliding_layer_holds_no_more_than_its_window_however_far_it_goes():
    kind = "sliding and full"
    cache = prefill(model(kind), prompt(40), named("adakv"), 0.4).cache
    sliding = [layer for layer in cache.layers if isinstance(layer, RaggedLayer) and layer.is_sliding]
    with reading(model(kind)):
        for seed in range(20):
            forward(model(kind), prompt(1, seed=seed), cache)
    assert sliding
    for layer in sliding:
        assert layer.keys.shape[2] <= 8
        assert len(layer.slots) == 0  # all of the prompt has slid out


@torch.no_grad()
def test_windows_go_back_as_far_as_they_recorded_their_past():
    kind = "sliding and full"
    tokens = prompt(40)
    cache, other = (prefill(model(kind), tokens, named("adakv"), 0.4).cache for _ in range(2))
    with reading(model(kind)):
        cache.layers[0].activate_past_recording()
        for layer in cache.layers[1:]:
            layer.activate_past_recording() if hasattr(layer, "activate_past_recording") else None
        forward(model(kind), prompt(5, seed=1), cache)
        cache.crop(-5)
        assert torch.equal(forward(model(kind), prompt(3, seed=2), cache), forward(model(kind), prompt(3, seed=2), other))
        forward(model(kind), prompt(9, seed=3), other)
        forward(model(kind), prompt(1, seed=3), other)
    with pytest.raises(ValueError, match="has dropped entries that would be seen again"):
        other.crop(-9)


REFUSED = [
    ("glm_moe_dsa", "sdpa", "uses sparse-index attention"),
    ("bloom", "eager", "uses ALiBi"),
    ("mpt", "eager", "uses ALiBi"),
    ("mamba", "eager", "nothing to evict"),
    ("jetmoe", "sdpa", "4 KV heads of 2 cached ones"),
]
if LATEST:
    REFUSED += [
        ("inkling_text", "sdpa", "of a kind that is not known"),
        ("diffllama", "sdpa", "values that it mixes between heads"),
        ("longcat_flash", "sdpa", "attends several times in a pass"),
    ]


@torch.no_grad()
@pytest.mark.parametrize(("family", "attention", "message"), REFUSED, ids=[case[0] for case in REFUSED])
def test_attention_that_cannot_be_evicted_from_is_refused_by_name(family, attention, message):
    with pytest.raises(UnsupportedAttention, match=message):
        prefill(tiny_model(family, attention=attention), prompt(20), named("snapkv"), 0.5)
