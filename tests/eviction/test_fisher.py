"""The KL of a removal, estimated from gradients: against exact leave-one-out, finite differences, and itself in other circumstances."""

import pytest
import torch
from kinds import KINDS, LINEAR, model
from models import prompt, tiny
from scipy.stats import spearmanr
from transformers.cache_utils import DynamicCache

import eviction.replay
from eviction import Moments, Observation, evicting, policy, prefill
from eviction.looked import look
from eviction.signs import Asked, balanced_signs
from hooks import UnsupportedAttention, capture
from hooks.dispatch import intercept, is_intercepted
from hooks.forward import forward
from hooks.intervene import apart
from hooks.tiny import tiny_model
from perturbation.removal import Removals


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
        estimate = seen.nats[0, :, :39].flatten()
        assert spearmanr(exact, estimate)[0] > 0.998
        assert 0.95 < estimate.sum() / exact.sum() < 1.05


def changes(seen: Observation) -> torch.Tensor:
    """What removing an entry of a cached KV head does to the last query's attention output [cached heads, keys, heads, value_dim]."""
    record, weights = seen.record, seen.weights[0, :, -1].double()
    values = record.values[0].double()
    found = torch.zeros(seen.n_kv_heads, record.n_keys, record.n_heads, values.shape[-1], dtype=torch.float64)
    for head in range(record.n_heads):
        own = values[head // record.group]
        output = weights[head] @ own
        for entry in range(record.n_keys):
            odds = weights[head, entry] / (1 - weights[head, entry])
            found[head // (record.n_heads // seen.n_kv_heads), entry, head] = odds * (output - own[entry])
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LINEAR])
def test_the_estimate_is_that_of_finite_differences(kind, monkeypatch):
    """The last query alone: its attention output is moved as a removal moves it, a little, and the whole model runs on."""
    used, tokens = model(kind), prompt(21)
    found = observed(used, tokens, monkeypatch, window=1, signs=2, seed=3)

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
    epsilon = torch.stack(list(balanced_signs(p[None, None], 2, [3 * 1_000_003])))[:, 0, 0]
    step = 1e-3  # norms, and the softmax of eager attention, are rounded to float32
    for place, seen in enumerate(found):
        removed = changes(seen)
        sizes = removed.square().sum((-1, -2))
        for head, entry in [divmod(int(sizes.argmax()), sizes.shape[1]), (0, 3)]:
            if not sizes[head, entry]:  # not seen
                assert not seen.nats[0, head, entry]
                continue
            push = removed[head, entry] / sizes[head, entry].sqrt() * step
            difference = (said(place, push) - said(place, -push)) / (2 * step) * sizes[head, entry].sqrt()
            expected = (p.sqrt() * epsilon * difference).sum(-1).square().mean() / 2
            torch.testing.assert_close(seen.nats[0, head, entry], expected, rtol=4e-2, atol=1e-3 * float(seen.nats.amax()))


@torch.no_grad()
def test_every_query_of_a_window_is_as_if_it_were_the_last(monkeypatch):
    used, tokens = tiny("llama", dtype=torch.float64), prompt(30)
    drawn = eviction.replay.directions

    def alike(logits, asked, first):  # the same signs for every query, so that they can be compared
        return torch.cat([drawn(part, asked, 0) for part in logits.split(1, 1)], 2)

    monkeypatch.setattr(eviction.replay, "directions", alike)
    window = observed(used, tokens, monkeypatch, window=3, signs=4)
    alone = [observed(used, tokens[:, : 28 + query], monkeypatch, window=1, signs=4) for query in range(3)]
    for layer, together in enumerate(window):
        mean = sum(torch.nn.functional.pad(one[layer].nats, (0, 2 - query)) for query, one in enumerate(alone)) / 3
        torch.testing.assert_close(together.nats, mean)


@torch.no_grad()
def test_results_do_not_depend_on_how_many_queries_run_together_nor_on_the_batch(monkeypatch):
    used, tokens = tiny("llama", dtype=torch.float64), prompt(30, batch=2)
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    whole = observed(used, tokens, monkeypatch, mask, window=5, signs=3)
    monkeypatch.setattr(eviction.replay, "together", lambda held: 2)
    single = observed(used, tokens, monkeypatch, mask, window=5, signs=3)
    row = observed(used, tokens[1:, 7:], monkeypatch, window=5, signs=3)
    for one, other, alone in zip(whole, single, row, strict=True):
        torch.testing.assert_close(one.nats, other.nats)
        torch.testing.assert_close(one.nats[1:, :, 7:], alone.nats)
        torch.testing.assert_close(one.nats[1, :, :7], torch.zeros_like(one.nats[1, :, :7]))


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


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi"])
def test_straight_through_carries_the_change_of_the_residual_stream_to_the_final_norm(family):
    used, tokens = tiny(family, dtype=torch.float64), prompt(24)
    looked = look(used, tokens, window=1)
    seen = looked.seen_by(policy("straight-through", window=1, signs=4096))
    head, norm = (
        used.get_output_embeddings(),
        next(module for name, module in used.named_modules() if name.endswith((".norm", ".ln_f", ".final_layernorm"))),
    )
    hidden = seen[-1].record.hidden_after[0, -1]
    p = head(norm(hidden)).softmax(-1)
    for one in seen:
        removed = torch.einsum("knhv,hvd->knd", changes(one), one.record.projection_blocks)
        jacobian = torch.autograd.functional.jacobian(lambda stream: head(norm(stream)), hidden)
        moved = removed @ jacobian.T
        exact = ((p * moved.square()).sum(-1) - (p * moved).sum(-1).square()) / 2
        assert spearmanr(exact.flatten(), one.nats[0].flatten())[0] > 0.998
        torch.testing.assert_close(one.nats[0].sum(), exact.sum(), rtol=0.05, atol=0)


@torch.no_grad()
def test_with_no_layers_above_the_whole_model_is_the_layer_itself():
    looked = look(tiny("qwen3", dtype=torch.float64), prompt(24), window=3)
    model_, layer = (looked.nats(Asked(4, 1, path), 3) for path in ("model", "layer"))
    torch.testing.assert_close(model_[looked.calls[-1]], layer[looked.calls[-1]])
    assert not torch.allclose(model_[looked.calls[0]], layer[looked.calls[0]], rtol=0.1)


@torch.no_grad()
def test_models_whose_layers_hand_on_several_streams_are_refused_straight_through():
    with pytest.raises(UnsupportedAttention, match="more than one hidden state"):
        prefill(tiny_model("gemma3n_text"), prompt(20), policy("straight-through", window=4), 0.5)
    with pytest.raises(UnsupportedAttention, match="have no attention"), apart(tiny_model("qwen3_next")):
        pass


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_are_scored_in_float32(dtype):
    half, single = tiny("llama", dtype=dtype), tiny("llama", dtype=torch.float32)
    single.load_state_dict(half.state_dict())
    for one, other in zip(
        *(look(used, prompt(40), window=4).seen_by(policy("fisher", window=4)) for used in (half, single)), strict=True
    ):
        assert one.nats.dtype == torch.float32
        assert spearmanr(one.nats.flatten(), other.nats.flatten())[0] > 0.9


@torch.no_grad()
def test_models_that_view_what_attention_returns_can_run_again():
    assert prefill(tiny_model("afmoe"), prompt(20), policy("fisher", window=4), 0.5).cache is not None
