"""Capture records what attention used, changes nothing, and leaves nothing behind."""

import threading

import numpy as np
import oracles
import pytest
import torch
from models import prompt, tiny
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hooks import UnsupportedAttention, capture
from hooks.dispatch import is_intercepted
from hooks.forward import forward
from perturbation import attention_output, attention_weights

FAMILIES = [
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("qwen3", "sdpa"),  # norms on queries and keys
    ("gpt2", "sdpa"),  # W_O is a Conv1D with a bias
    ("gpt2", "eager"),
    ("phi", "sdpa"),  # W_O is called dense, parallel residual
    ("gemma2", "eager"),  # soft-capped logits, norms after attention
    ("gpt_oss", "eager"),  # learned sinks
]


def left_behind(model: nn.Module) -> list[str]:
    """Hooks on modules and overrides in the registry that a test finds."""
    hooks = [
        f"{name}: {kind}"
        for name, module in model.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks")
        if getattr(module, kind)
    ]
    return hooks + list(ALL_ATTENTION_FUNCTIONS._local_mapping) + ["handlers"] * is_intercepted(model)


@torch.no_grad()
@pytest.mark.parametrize(("family", "attention"), FAMILIES)
def test_logits_are_bit_for_bit_those_without_capture(family, attention):
    model = tiny(family, attention)
    plain = model(prompt()).logits
    with capture(model, window=5) as captured:
        watched = model(prompt()).logits
    assert torch.equal(plain, watched)
    assert [record.layer for record in captured] == [0, 1, 2]
    assert left_behind(model) == []


@torch.no_grad()
@pytest.mark.parametrize(("family", "attention"), FAMILIES)
def test_weights_from_the_record_give_what_the_module_computed(family, attention):
    """Float64: Σ A V equals the input of W_O, and Σ_h A V W_h + bias what W_O returned."""
    model = tiny(family, attention, dtype=torch.float64)
    with capture(model, window=7) as captured:
        model(prompt(batch=2))
    for record in captured:
        assert record.queries.shape[:3] == (2, 4, 7)
        weights, sink_mass = attention_weights(**record.inputs)
        # many families' eager attention casts the softmax to float32
        allowed = 1e-12 if attention == "sdpa" else 1e-6
        heads = attention_output(weights, record.values)
        torch.testing.assert_close(heads.transpose(1, 2), record.attention_output, rtol=allowed, atol=allowed)
        written = (heads @ record.projection_blocks).sum(1)
        if record.output_projection.bias is not None:
            written = written + record.output_projection.bias
        torch.testing.assert_close(written, record.projected_output, rtol=allowed, atol=100 * allowed)
        assert (sink_mass > 0).all() == (family == "gpt_oss")


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_weights_from_the_record_equal_the_models_own_and_the_oracle(family):
    model = tiny(family, "eager", dtype=torch.float64)
    with capture(model, window=6) as captured:
        own = model(prompt(), output_attentions=True).attentions
    for record, theirs in zip(captured, own, strict=True):
        weights, _ = attention_weights(**record.inputs)
        torch.testing.assert_close(weights, theirs[:, :, -6:].double(), rtol=0, atol=1e-6)
        causal = np.tril(np.ones((24, 24), bool))[None, None, -6:].repeat(4, 1)
        expected, _ = oracles.attention(record.queries, record.keys, record.scale, causal, record.softcap, record.sinks)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_hidden_states_are_those_around_the_layer():
    model = tiny("llama")
    with capture(model, window=4) as captured:
        states = model(prompt(), output_hidden_states=True).hidden_states
    for index, record in enumerate(captured):
        assert torch.equal(record.hidden_before, states[index][:, -4:])
        if index < 2:  # the last of transformers' hidden states has the final norm applied
            assert torch.equal(record.hidden_after, states[index + 1][:, -4:])


@torch.no_grad()
def test_decoding_on_a_cache_is_recorded_with_all_its_keys():
    model, cache = tiny("llama", dtype=torch.float64), DynamicCache()
    tokens = prompt(20)
    with capture(model, window=None) as whole:
        model(tokens)
    forward(model, tokens[:, :17], cache)
    with capture(model, window=None) as rest:
        forward(model, tokens[:, 17:18], cache)
        forward(model, tokens[:, 18:], cache)
    assert [(record.layer, record.call) for record in rest] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    first, last = rest[0], rest.named("model.layers.0.self_attn")
    assert (first.n_queries, first.n_keys, last.n_queries, last.n_keys) == (1, 18, 2, 20)
    expected = attention_weights(**whole[0].inputs)[0]
    got = attention_weights(**last.inputs)[0]
    torch.testing.assert_close(got, expected[:, :, -2:])
    torch.testing.assert_close(attention_weights(**first.inputs)[0], expected[:, :, 17:18, :18])


@torch.no_grad()
def test_only_the_window_of_queries_is_kept_alive():
    """A record of 3 queries must not hold on to the storage of 24."""
    with capture(tiny("llama"), window=3) as captured:
        tiny("llama")
        model = tiny("llama")
    with capture(model, window=3) as captured:
        model(prompt())
    for record in captured:
        for name in ("queries", "mask", "hidden_before", "hidden_after", "attention_output", "projected_output"):
            tensor = getattr(record, name)
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name


@torch.no_grad()
def test_a_visitor_gets_each_layer_as_it_ends_and_nothing_is_kept():
    model, seen = tiny("llama"), []
    with capture(model, window=2, visitor=lambda record: seen.append(record.name)) as captured:
        model(prompt())
    assert seen == [f"model.layers.{index}.self_attn" for index in range(3)]
    assert len(captured) == 0


@torch.no_grad()
def test_only_the_layers_asked_for_are_recorded():
    model = tiny("llama")
    with capture(model, layers=[2, 0]) as captured:
        model(prompt())
    assert [record.layer for record in captured] == [0, 2]
    with pytest.raises(ValueError, match=r"layers \[3, 9\] do not exist: the model has 3"), capture(model, layers=[9, 3, 1]):
        pass


@torch.no_grad()
@pytest.mark.parametrize("where", ["in the block", "in the visitor", "in the model"])
def test_nothing_is_left_after_an_exception(where, monkeypatch):
    model = tiny("llama")
    before = model(prompt()).logits

    def explode(*args, **kwargs):
        raise RuntimeError("on purpose")

    context = pytest.raises(RuntimeError, match="on purpose")
    if where == "in the block":
        with context, capture(model):
            model(prompt())
            explode()
    elif where == "in the visitor":
        with context, capture(model, visitor=explode):
            model(prompt())
    else:
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[1].mlp, "forward", explode)
            with context, capture(model):
                model(prompt())
    assert left_behind(model) == []
    assert torch.equal(model(prompt()).logits, before)


@torch.no_grad()
def test_captures_of_one_model_nest_and_each_sees_everything():
    model = tiny("llama")
    plain = model(prompt()).logits
    with capture(model, window=2) as outer:
        with capture(model, window=3) as inner:
            assert torch.equal(model(prompt()).logits, plain)
        model(prompt())
    assert (len(inner), len(outer)) == (3, 6)
    assert torch.equal(inner[0].queries[:, :, -2:], outer[0].queries)
    assert left_behind(model) == []


def test_captures_of_two_models_in_two_threads_do_not_see_each_other():
    models = [tiny("llama"), tiny("qwen3")]
    expected = []
    for number, model in enumerate(models):
        with torch.no_grad(), capture(model, window=4) as captured:
            model(prompt(seed=number))
        expected.append([record.queries for record in captured])
    barrier, found = threading.Barrier(2), [[], []]

    def work(number):
        for _ in range(8):
            barrier.wait()
            with torch.no_grad(), capture(models[number], window=4) as captured:
                models[number](prompt(seed=number))
            found[number].append([record.queries for record in captured])

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (0, 1):
        assert len(found[number]) == 8
        for queries in found[number]:
            assert len(queries) == 3
            for got, wanted in zip(queries, expected[number], strict=True):
                torch.testing.assert_close(got, wanted)
    assert ALL_ATTENTION_FUNCTIONS._local_mapping == {}


@torch.no_grad()
def test_another_users_override_of_the_registry_is_put_back():
    def mine(*args, **kwargs):
        return original(*args, **kwargs)

    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
    try:
        model = tiny("llama")
        with capture(model) as captured:
            model(prompt())
        assert len(captured) == 3
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def test_a_gate_before_w_o_is_refused_not_ignored():
    model = tiny("afmoe", num_dense_layers=1, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
    with torch.no_grad(), pytest.raises(UnsupportedAttention, match="is not the attention output"), capture(model):
        model(prompt())
    assert left_behind(model) == []


def test_a_norm_before_w_o_is_refused_not_ignored():
    model = tiny("bitnet")
    with torch.no_grad(), pytest.raises(UnsupportedAttention, match="is not the attention output"), capture(model):
        model(prompt())
    assert left_behind(model) == []


def test_attention_that_is_not_dispatched_is_refused_by_name():
    model = tiny("bloom", "eager")
    with pytest.raises(UnsupportedAttention, match="BloomForCausalLM does not dispatch"), capture(model):
        pass


def test_an_adapter_around_w_o_is_refused_by_name():
    model = tiny("llama")
    model.model.layers[1].self_attn.o_proj = nn.Sequential(model.model.layers[1].self_attn.o_proj)
    with torch.no_grad(), pytest.raises(UnsupportedAttention, match=r"o_proj is a Sequential"), capture(model):
        model(prompt())


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_below_one_query_is_refused(window):
    with pytest.raises(ValueError, match=f"at least 1 query, not {window}"), capture(tiny("llama"), window=window):
        pass


def test_an_unknown_name_is_answered_with_the_known_ones():
    model = tiny("llama")
    with torch.no_grad(), capture(model) as captured:
        model(prompt())
    with pytest.raises(KeyError, match=r"model\.layers\.2\.self_attn"):
        captured.named("model.layers.7.self_attn")
