"""The KL of a removal, estimated from gradients: against exact leave-one-out, finite differences, and itself in other circumstances."""

import pytest
import torch
from kinds import KINDS, model
from models import prompt, tiny
from scipy.stats import spearmanr
from transformers.cache_utils import DynamicCache

import eviction.replay
from eviction import Moments, Observation, evicting, policy, prefill
from eviction.accumulate.fisher import removal_nats
from hooks import UnsupportedAttention, capture
from hooks.dispatch import intercept, is_intercepted
from hooks.forward import forward
from hooks.tiny import tiny_model
from perturbation.removal import Removals

HYBRID = ("gated, beside linear attention", "beside a state space in the same layer", "one attention module for several layers")


def observed(used, tokens, monkeypatch, mask=None, **settings) -> list[Observation]:
    """What the policy saw of each layer, its gradients among it."""
    seen = []
    chosen = policy("fisher", **{"dilation": 0.0, "sink": 0, **settings})
    original = type(chosen).score
    with monkeypatch.context() as patch:
        patch.setattr(type(chosen), "score", lambda self, one, budget: (seen.append(one), original(self, one, budget))[1])
        prefill(used, tokens, chosen, 0.5, attention_mask=mask)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi", "olmo2"])
def test_the_estimate_ranks_as_exact_leave_one_out_and_is_of_its_size(family, monkeypatch):
    used, tokens = tiny(family, dtype=torch.float64), prompt(40)
    removals = Removals.of(used, tokens[:, :-1], tokens[:, -1:])
    for seen in observed(used, tokens, monkeypatch, window=1, signs=2000):
        exact = torch.cat([found.kl[:, 0] for _, found in removals.one_by_one(seen.record.layer)])
        estimate = removal_nats(seen)[0, :, :39].flatten()
        assert spearmanr(exact, estimate)[0] > 0.998
        assert 0.95 < estimate.sum() / exact.sum() < 1.05


@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in HYBRID])
def test_gradients_are_those_of_finite_differences(kind, monkeypatch):
    """The last query alone: its hidden state is moved at one attention output, the whole model runs on."""
    used, tokens = model(kind), prompt(21)
    found = observed(used, tokens, monkeypatch, window=1, signs=2, seed=3)
    epsilon = torch.randint(
        0, 2, (2, used.config.vocab_size), generator=torch.Generator().manual_seed(3 * 1_000_003), dtype=torch.int8
    )
    epsilon = (2 * epsilon - 1).double()

    def said(place: int, push):
        calls = []

        def handler(call, proceed):
            output, weights = proceed(call)
            calls.append(1)
            if len(calls) == place + 1 and push is not None:
                output = torch.cat([output[:, :-1], output[:, -1:] + push], 1)
            return output, weights

        with intercept(used, handler):
            return forward(used, tokens, DynamicCache(config=used.config))[0, -1].log_softmax(-1)

    p = said(0, None).exp()
    step = 1e-3  # norms, and the softmax of eager attention, are rounded to float32
    for place, seen in enumerate(found):
        shape = seen.record.attention_output[:, -1:].shape
        push = torch.randn(shape, generator=torch.Generator().manual_seed(place), dtype=torch.float64) * step
        difference = (said(place, push) - said(place, -push)) / 2
        expected = (p.sqrt() * epsilon * difference).sum(-1) / step
        got = (seen.gradients[:, 0, 0] * push[0, 0] / step).sum((-1, -2))
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=5e-3)


@torch.no_grad()
def test_every_query_of_a_window_is_as_if_it_were_the_last(monkeypatch):
    used, tokens = tiny("llama", dtype=torch.float64), prompt(30)
    drawn = eviction.replay._directions

    def alike(logits, signs, seed, start):  # the same signs for every query, so that they can be compared
        return torch.cat([drawn(part, signs, seed, 0) for part in logits.split(1, 1)], 2)

    monkeypatch.setattr(eviction.replay, "_directions", alike)
    window = observed(used, tokens, monkeypatch, window=3, signs=4)
    for query in range(3):
        alone = observed(used, tokens[:, : 28 + query], monkeypatch, window=1, signs=4)
        for together, one in zip(window, alone, strict=True):
            torch.testing.assert_close(together.gradients[:, 0, query], one.gradients[:, 0, 0])


@torch.no_grad()
def test_results_do_not_depend_on_how_many_queries_run_together_nor_on_the_batch(monkeypatch):
    used, tokens = tiny("llama", dtype=torch.float64), prompt(30, batch=2)
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    whole = observed(used, tokens, monkeypatch, mask, window=5, signs=3)
    monkeypatch.setattr(eviction.replay, "WEIGHTS", 1)
    single = observed(used, tokens, monkeypatch, mask, window=5, signs=3)
    row = observed(used, tokens[1:, 7:], monkeypatch, window=5, signs=3)
    for one, other, alone in zip(whole, single, row, strict=True):
        torch.testing.assert_close(removal_nats(one), removal_nats(other))
        torch.testing.assert_close(removal_nats(one)[1:, :, 7:], removal_nats(alone))
        torch.testing.assert_close(removal_nats(one)[1, :, :7], torch.zeros_like(removal_nats(one)[1, :, :7]))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("trainable", [True, False])
def test_nothing_is_left_on_the_model_whatever_surrounds_the_pass(around, trainable, monkeypatch):
    used, tokens = tiny("llama"), prompt(30)
    expected = prefill(used, tokens, policy("fisher", window=4), 0.4)
    used.requires_grad_(trainable)
    with around():
        found = prefill(used, tokens, policy("fisher", window=4), 0.4)
    for one, other in zip(found.decisions, expected.decisions, strict=True):
        assert torch.equal(one.keep, other.keep)
    assert all(part.requires_grad == trainable and part.grad is None for part in used.parameters())
    assert not is_intercepted(used)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in used.modules())
    assert all(not layer.keys.requires_grad for layer in found.cache.layers)


@torch.no_grad()
@pytest.mark.parametrize("when", [Moments(every=3), Moments(prefill=False, every=2)])
def test_fisher_chooses_in_chunks_and_while_decoding(when):
    used, cache, kept = tiny("llama", dtype=torch.float64), DynamicCache(), []
    with evicting(used, policy("fisher", window=4, sink=1), 12, when, watch=lambda event: kept.append(event.keep)):
        for seed, count in enumerate((14, 9, 2, 1, 1, 1, 1, 1, 1)):
            forward(used, prompt(count, seed=seed), cache)
    assert len(kept) >= 3
    for masks in kept:
        assert sum(int(mask.sum()) for mask in masks) == 12 * 2 * 3  # one ranking over the model: the sum is the budget
        assert all(mask[..., 0].all() and mask[..., -4:].all() for mask in masks)


@torch.no_grad()
def test_where_it_cannot_be_estimated_is_refused():
    for family in ("qwen3_next", "falcon_h1"):
        with pytest.raises(UnsupportedAttention, match="linear state"):
            prefill(tiny_model(family), prompt(20), policy("fisher", window=4), 0.5)
    used = tiny("llama")
    with capture(used, window=4) as captured:
        used(prompt(20))
    with pytest.raises(ValueError, match="use it with prefill"):
        policy("fisher", window=4).score(captured[0], 0.5)
    with evicting(used, policy("fisher", window=4), 10), pytest.raises(ValueError, match="input_ids"):
        used(inputs_embeds=torch.randn(1, 20, 32))
