"""Decoding on an evicted cache equals decoding on the full one with the evicted entries masked."""

import pytest
import torch
from models import prompt, tiny
from safetensors.torch import save_file
from transformers import cache_utils
from transformers.cache_utils import DynamicCache

from eviction import BudgetError, EvictedCache, cache_bytes, generate, policy, prefill, reading, snapkv, snapkv_two_stage
from hooks import UnsupportedAttention, hiding
from hooks.forward import cache_keyword, forward
from hooks.tiny import tiny_model
from perturbation import attention_weights

POLICIES = [snapkv(window=4, kernel=3), snapkv_two_stage(window=4, kernel=3)]
FAMILIES = [("llama", "sdpa"), ("llama", "eager"), ("qwen3", "sdpa"), ("gpt2", "sdpa"), ("phi", "eager")]


@torch.no_grad()
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize(("family", "attention"), FAMILIES)
@pytest.mark.parametrize("budget", [0.3, 17, 1.0])
def test_evicted_decoding_equals_masked_decoding_at_every_step(policy, family, attention, budget):
    model, tokens = tiny(family, attention, dtype=torch.float64), prompt(40)
    prefilled = prefill(model, tokens, policy, budget)
    full = DynamicCache(config=model.config)
    torch.testing.assert_close(forward(model, tokens, full, last_logits=1), prefilled.logits)
    keep = [decision.keep for decision in prefilled.decisions]
    allowed = 1e-10 if attention == "sdpa" else 1e-5  # eager attention casts its softmax to float32
    for step in (prompt(1, seed=1), prompt(3, seed=2), prompt(1, seed=3)):  # one token, several, one again
        evicted_logits = forward(model, step, prefilled.cache)
        with hiding(model, keep):
            masked_logits = forward(model, step, full)
        torch.testing.assert_close(evicted_logits, masked_logits, rtol=allowed, atol=allowed)
    assert prefilled.cache.get_seq_length() == full.get_seq_length() == 45


@torch.no_grad()
def test_evicting_something_is_not_evicting_nothing():
    """The equality above could hold if nothing were evicted; it is."""
    model, tokens = tiny("llama", dtype=torch.float64), prompt(40)
    evicted = forward(model, prompt(1, seed=1), prefill(model, tokens, POLICIES[0], 0.2).cache)
    full = DynamicCache(config=model.config)
    forward(model, tokens, full)
    assert (evicted - forward(model, prompt(1, seed=1), full)).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("budget", [0.25, 30, 1.0])
def test_the_evicted_cache_holds_the_budget_and_its_bytes_shrink_in_proportion(budget):
    model, tokens = tiny("llama"), prompt(40)
    prefilled = prefill(model, tokens, POLICIES[1], budget)
    entries = budget if isinstance(budget, int) else round(40 * budget)
    assert prefilled.cache.entries == entries
    assert prefilled.full_bytes == 3 * 2 * (2 * 40 * 8) * 4  # layers, K and V, heads · entries · dims, float32
    slots = 0 if entries == 40 else 3 * 2 * entries * 4  # where each entry stood, int32; a full cache is left as it was
    assert (prefilled.cache.nbytes - slots) * 40 == prefilled.full_bytes * entries
    for decision in prefilled.decisions:
        assert (decision.keep.sum(-1) == entries).all()
        assert decision.keep[..., -4:].all()


@torch.no_grad()
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_keys_and_values_of_the_cache_are_the_chosen_ones_in_order(policy):
    model, tokens = tiny("llama"), prompt(40)
    full = DynamicCache(config=model.config)
    forward(model, tokens, full)
    prefilled = prefill(model, tokens, policy, 0.4)
    for layer, kept, decision in zip(full.layers, prefilled.cache.layers, prefilled.decisions, strict=True):
        for head in range(2):
            where = decision.keep[0, head]
            assert torch.equal(kept.keys[0, head], layer.keys[0, head, where])
            assert torch.equal(kept.values[0, head], layer.values[0, head, where])


@torch.no_grad()
def test_the_two_policies_choose_differently_where_norms_differ():
    model, tokens = tiny("llama"), prompt(60)
    keeps = [torch.stack([d.keep for d in prefill(model, tokens, policy, 0.3).decisions]) for policy in POLICIES]
    assert not torch.equal(*keeps)


@torch.no_grad()
def test_generate_decodes_on_what_is_left_and_returns_prompt_and_answer():
    model, tokens = tiny("llama", dtype=torch.float64), prompt(40)
    answer = generate(model, tokens, POLICIES[0], 0.5, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(answer[:, :40], tokens)
    assert answer.shape == (1, 46)
    # by hand: evict all but the last token, then decode greedily on the masked full cache
    keep = [decision.keep for decision in prefill(model, tokens[:, :-1], POLICIES[0], 0.5).decisions]
    full = DynamicCache(config=model.config)
    forward(model, tokens[:, :-1], full)
    token, expected = tokens[:, -1:], []
    with hiding(model, keep):
        for _ in range(6):
            token = forward(model, token, full).argmax(-1)
            expected.append(token)
    assert torch.equal(answer[:, 40:], torch.cat(expected, 1))


@torch.no_grad()
def test_generate_with_everything_kept_is_generate():
    model, tokens = tiny("llama"), prompt(40)
    plain = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
    assert torch.equal(generate(model, tokens, POLICIES[1], 1.0, max_new_tokens=8, do_sample=False), plain)


def test_a_prompt_of_one_token_and_masks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="at least 2 tokens"):
        generate(tiny("llama"), prompt(1), POLICIES[0], 0.5)
    right = torch.ones(2, 20, dtype=torch.long)
    right[0, 15:] = 0
    with pytest.raises(ValueError, match="a 0 after a 1"):
        prefill(tiny("llama"), prompt(20, batch=2), POLICIES[0], 0.5, attention_mask=right)
    plain = prefill.__wrapped__  # past beartype, which would stop it first
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    with pytest.raises(ValueError, match=r"\(2, 19\) does not fit tokens \(2, 20\)"):
        plain(tiny("llama"), prompt(20, batch=2), POLICIES[0], 0.5, attention_mask=right[:, 1:])


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match=r"at least one token is needed, not tokens \(1, 0\)"):
        prefill(tiny("llama"), prompt(0), POLICIES[0], 0.5)


def test_what_is_no_budget_is_refused_before_the_prefill(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(model, "forward", lambda *a, **k: pytest.fail("the model ran"))
    for budget in (0, -1, 0.0, 1.5, float("nan"), True):
        with pytest.raises(BudgetError, match="budget"):
            prefill(model, prompt(40), POLICIES[0], budget)


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 2, 4, 0.01])
def test_a_budget_within_the_window_keeps_the_last_entries_but_one_and_the_best_of_the_rest(budget):
    model = tiny("llama")
    entries = budget if isinstance(budget, int) else 1
    for decision in prefill(model, prompt(40), POLICIES[0], budget).decisions:
        assert (decision.keep.sum(-1) == entries).all()
        assert decision.keep[..., 40 - (entries - 1) :].all()


@torch.no_grad()
def test_taking_back_tokens_works_as_far_as_they_were_written_after_the_eviction():
    model, tokens = tiny("llama", dtype=torch.float64), prompt(40)
    cache = prefill(model, tokens, POLICIES[0], 0.5).cache
    first = forward(model, prompt(3, seed=1), cache)
    cache.crop(-3)
    torch.testing.assert_close(forward(model, prompt(3, seed=1), cache), first)
    with pytest.raises(ValueError, match="only 3 were written after the eviction"):
        cache.crop(-4)
    with pytest.raises(RuntimeError, match="cannot be reset"):
        cache.reset()


@torch.no_grad()
def test_masks_that_the_cache_cannot_hold_are_refused():
    model, cache = tiny("llama"), DynamicCache()
    forward(model, prompt(10), cache)
    ragged = torch.ones(1, 2, 10, dtype=torch.bool)
    ragged[0, 1] = False
    with pytest.raises(ValueError, match=r"heads keep \[\[10, 0\]\] entries; each must keep at least one"):
        EvictedCache.compacted(cache, [ragged] * 3)
    with pytest.raises(ValueError, match="2 keep-masks for a cache of 3 layers"):
        EvictedCache.compacted(cache, [ragged] * 2)
    with pytest.raises(ValueError, match=r"keep \(1, 2, 9\)"):
        EvictedCache.compacted(cache, [ragged[..., :9]] * 3)


@torch.no_grad()
def test_caches_that_cannot_be_compacted_are_refused_by_name():
    model = tiny("llama")
    keep = [torch.ones(1, 2, 4, dtype=torch.bool)] * 3
    quantised = DynamicCache()
    quantised.layers = [object.__new__(cache_utils.QuantoQuantizedLayer)]
    for cache, message in (
        (cache_utils.StaticCache(config=model.config, max_cache_len=8), "StaticLayer: it holds a fixed number of slots"),
        (quantised, "QuantoQuantizedLayer: its entries are stored quantised"),
        (DynamicCache(offloading=True), "offloaded"),
        (cache_utils.EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache cannot be compacted"),
    ):
        with pytest.raises(UnsupportedAttention, match=message):
            EvictedCache.compacted(cache, keep)
    model.config._attn_implementation = "paged|sdpa"
    with pytest.raises(UnsupportedAttention, match="keeps entries in pages"):
        prefill(model, prompt(8), POLICIES[0], 0.5)


@torch.no_grad()
def test_stage_1_holds_the_entries_with_most_attention():
    model, tokens = tiny("llama"), prompt(40)
    from hooks import capture

    with capture(model, window=4) as captured:
        model(tokens)
    policy = snapkv_two_stage(alpha=0.5, window=4, kernel=1)
    for record in captured:
        decision = policy.decide(record, 20)
        attention = attention_weights(**record.inputs)[0][..., :36].mean(2).unflatten(1, (2, 2)).mean(2)
        chosen = decision.stage1[..., :36]
        assert (chosen.sum(-1) == 8).all()
        assert (attention.masked_fill(~chosen, 2).amin(-1) >= attention.masked_fill(chosen, -1).amax(-1)).all()


def test_bytes_count_a_shared_storage_once():
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), 0)
    before = cache_bytes(cache)
    cache.layers[0].values = cache.layers[0].keys
    assert (before, cache_bytes(cache)) == (64, 32)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("chosen", [POLICIES[1], policy("adakv", window=4, kernel=3)], ids=["uniform", "ragged"])
def test_rows_padded_on_the_left_get_what_they_get_alone(family, chosen):
    """Budgets by the row's own length, pads never kept or counted, and the same logits while decoding."""
    model = tiny_model(family, dtype=torch.float64)
    tokens, mask = prompt(30, batch=3), torch.ones(3, 30, dtype=torch.long)
    mask[1, :12] = mask[2, :3] = 0
    together = prefill(model, tokens, chosen, 0.4, attention_mask=mask)
    step = prompt(2, batch=3, seed=3)
    with reading(model):
        more = torch.cat([mask, torch.ones(3, 2, dtype=torch.long)], 1)
        logits = forward(model, step, together.cache, attention_mask=more)
    for row in range(3):
        pads = 30 - int(mask[row].sum())
        alone = prefill(model, tokens[row : row + 1, pads:], chosen, 0.4)
        for one, all_rows in zip(alone.decisions, together.decisions, strict=True):
            assert torch.equal(all_rows.keep[row, :, pads:], one.keep[0])
            assert not all_rows.keep[row, :, :pads].any()
        with reading(model):
            expected = forward(model, step[row : row + 1], alone.cache)
        torch.testing.assert_close(logits[row : row + 1], expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1"])
@pytest.mark.parametrize("chosen", [POLICIES[1], policy("adakv", window=4, kernel=3)], ids=["uniform", "ragged"])
def test_beams_and_several_sequences_go_on_from_one_compressed_cache(family, chosen):
    model, tokens = tiny_model(family, dtype=torch.float64), prompt(40, batch=2)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = generate(model, tokens, chosen, 0.5, num_beams=3, num_return_sequences=2, **settings)
    keep = prefill(model, tokens[:, :-1], chosen, 0.5).keep
    full = DynamicCache(config=model.config)
    forward(model, tokens[:, :-1], full)
    full.reorder_cache(torch.arange(2).repeat_interleave(3))
    wide = [None if mask is None else mask.repeat_interleave(3, 0) for mask in keep]

    # beams of one prompt change places with each other alone, and what they keep is the same
    with hiding(model, wide):
        expected = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            num_beams=3,
            num_return_sequences=2,
            **{cache_keyword(model): full},
            **settings,
        )
    assert torch.equal(found, expected)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens: assisted decoding"),
        ({"use_cache": False}, "use_cache=False leaves nothing"),
        ({"past_key_values": None}, "generate makes its own cache"),
    ],
)
def test_settings_under_which_generate_would_feed_the_prompt_again_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny("llama"), prompt(40), POLICIES[0], 0.5, **settings)


@torch.no_grad()
def test_generate_uses_its_cache_whatever_the_models_configuration_says():
    model, tokens = tiny("llama"), prompt(40)
    expected = generate(model, tokens, POLICIES[0], 0.5, max_new_tokens=5, do_sample=False)
    model.generation_config.use_cache = False
    assert torch.equal(generate(model, tokens, POLICIES[0], 0.5, max_new_tokens=5, do_sample=False), expected)


@pytest.mark.skipif(not hasattr(cache_utils, "DummyLayer"), reason="this transformers lets a state stay where it is")
@torch.no_grad()
def test_a_crop_that_one_layer_refuses_changes_none():
    model = tiny_model("qwen3_next", layer_types=["full_attention", "linear_attention"] * 2)
    cache = prefill(model, prompt(40), policy("adakv", window=4, kernel=3), 0.4).cache
    with reading(model):
        forward(model, prompt(3, seed=1), cache)
    lengths = [layer.get_seq_length() for layer in cache.layers[::2]]
    with pytest.raises(RuntimeError):
        cache.crop(-1)
    assert [layer.get_seq_length() for layer in cache.layers[::2]] == lengths == [43, 43]


def test_files_that_hold_no_cache_are_refused(tmp_path):
    path = tmp_path / "cache.safetensors"
    for content in (b"", b"no safetensors at all", b"{}"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="no saved cache"):
            EvictedCache.load(path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="no saved cache of this version"):
        EvictedCache.load(path)


@torch.no_grad()
def test_keep_has_one_mask_for_each_decoder_layer():
    model = tiny_model("qwen3_next", layer_types=["full_attention", "linear_attention"] * 2)
    keep = prefill(model, prompt(20), POLICIES[0], 0.5).keep
    assert [mask is None for mask in keep] == [False, True, False, True]
