"""Capture records what attention used, changes nothing, and leaves nothing behind."""

import gc
import threading
import weakref

import numpy as np
import oracles
import pytest
import torch
import transformers
from models import prompt, tiny
from packaging.version import Version
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hooks import UnsupportedAttention, capture
from hooks.dispatch import AttentionCall, is_intercepted
from hooks.forward import forward
from hooks.masks import visible
from hooks.tiny import tiny_model
from perturbation import attention_output, attention_weights

# families that dispatch, or can be made tiny, only in later releases than the lowest that is supported
NEWER = pytest.mark.skipif(Version(transformers.__version__) < Version("5.20"), reason="not so in this transformers")

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
    with pytest.raises(ValueError, match=r"layers \[3, 9\] do not exist .* are \[0, 1, 2\]"), capture(model, layers=[9, 3, 1]):
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


@torch.no_grad()
@pytest.mark.parametrize(("family", "per_head"), [("afmoe", False), ("qwen3_next", False), ("laguna", True)])
def test_a_gate_before_w_o_is_recorded_and_makes_up_what_the_module_computed(family, per_head):
    model = tiny_model(family, dtype=torch.float64)
    with capture(model, window=6) as captured:
        model(prompt())
    assert left_behind(model) == []
    for record in captured:
        assert record.gate is not None
        assert (record.gate.std(-1) < 1e-12).all() == per_head
        heads = record.attention_output.transpose(1, 2) * record.gate
        torch.testing.assert_close((heads @ record.projection_blocks).sum(1), record.projected_output)


@torch.no_grad()
@pytest.mark.parametrize("family", ["bitnet", pytest.param("diffllama", marks=NEWER)])
def test_a_norm_before_w_o_refuses_numbers_per_head_with_its_reason_and_records_the_rest(family):
    model = tiny_model(family)
    plain = model(prompt()).logits
    with capture(model, window=6) as captured:
        assert torch.equal(model(prompt()).logits, plain)
    assert left_behind(model) == []
    for record in captured:
        with pytest.raises(UnsupportedAttention, match="the heads are coupled"):
            _ = record.projection_blocks
        torch.testing.assert_close(
            attention_output(attention_weights(**record.inputs)[0], record.values).transpose(1, 2), record.attention_output
        )


@torch.no_grad()
def test_asking_about_a_gate_is_seen_by_no_other_capture_and_writes_to_no_cache():
    model, cache = tiny_model("afmoe"), DynamicCache()
    plain = model(prompt()).logits
    with capture(model, window=2) as outer, capture(model, window=2) as inner:
        logits = forward(model, prompt(), cache)
    assert torch.equal(logits, plain)
    assert len(outer) == len(inner) == 4
    assert cache.get_seq_length() == 24


def test_attention_that_is_not_dispatched_is_refused_by_name():
    model = tiny("bloom", "eager")
    with pytest.raises(UnsupportedAttention, match="BloomForCausalLM does not dispatch"), capture(model):
        pass


@torch.no_grad()
def test_layers_without_attention_are_skipped_and_listed():
    model = tiny_model("jamba")
    with capture(model) as captured:
        model(prompt())
    assert [record.layer for record in captured] == [1, 3]
    assert captured.skipped == ("model.layers.0", "model.layers.2")


@NEWER
@torch.no_grad()
def test_a_layer_that_attends_twice_leaves_two_records():
    model = tiny_model("longcat_flash")
    with capture(model) as captured:
        model(prompt())
    names = [record.name for record in captured]
    assert len(names) == 2 * len({record.layer for record in captured}) == len(set(names))


@torch.no_grad()
def test_latent_attention_is_recorded_with_its_expanded_values():
    model = tiny_model("deepseek_v3", dtype=torch.float64, v_head_dim=4)
    with capture(model, window=3) as captured:
        model(prompt())
    record = captured[0]
    assert (record.queries.shape[-1], record.values.shape[-1], record.n_kv_heads) == (16, 4, 4)
    written = (attention_output(attention_weights(**record.inputs)[0], record.values) @ record.projection_blocks).sum(1)
    torch.testing.assert_close(written, record.projected_output)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_gives_the_numbers_of_the_row_alone(family, side):
    attention = "eager" if family == "gpt_oss" else "sdpa"
    model = tiny_model(family, attention=attention, dtype=torch.float64)
    rows = [prompt(length, seed=length) for length in (17, 9, 3)]
    padded = torch.zeros(3, 17, dtype=torch.long)
    mask = torch.zeros(3, 17, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(17 - row.shape[1], 17) if side == "left" else slice(0, row.shape[1])
        padded[number, place], mask[number, place] = row[0], 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with capture(model, window=5) as together:
        model(padded, attention_mask=mask, position_ids=positions)
    for number, row in enumerate(rows):
        with capture(model, window=5) as alone:
            model(row)
        held = min(5, row.shape[1])
        for record, single in zip(together, alone, strict=True):
            assert record.query_valid[number].tolist() == [False] * (5 - held) + [True] * held
            weights, sinks = attention_weights(**record.inputs)
            expected, expected_sinks = attention_weights(**single.inputs)
            real = mask[number].bool()
            allowed = {"rtol": 1e-5, "atol": 1e-6} if attention == "eager" else {"rtol": 1e-9, "atol": 1e-12}
            torch.testing.assert_close(weights[number, :, -held:][..., real], expected[0, :, -held:], **allowed)
            assert (weights[number, :, -held:][..., ~real] == 0).all()
            torch.testing.assert_close(sinks[number, :, -held:], expected_sinks[0, :, -held:], **allowed)
            torch.testing.assert_close(record.hidden_after[number, -held:], single.hidden_after[0, -held:], **allowed)
            torch.testing.assert_close(record.projected_output[number, -held:], single.projected_output[0, -held:], **allowed)


@torch.no_grad()
def test_flex_attention_is_recorded_as_its_block_mask_says():
    model = tiny_model("llama", head_dim=32, hidden_size=128)
    flex = tiny_model("llama", attention="flex_attention", head_dim=32, hidden_size=128)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    with capture(model, window=5) as expected:
        model(prompt(batch=2), attention_mask=mask)
    plain = flex(prompt(batch=2), attention_mask=mask).logits
    with capture(flex, window=5) as captured:
        assert torch.equal(flex(prompt(batch=2), attention_mask=mask).logits, plain)
    for record, other in zip(captured, expected, strict=True):
        assert torch.equal(record.mask.expand(2, 1, 5, 24), other.mask.expand(2, 1, 5, 24))
        weights = attention_weights(**record.inputs)[0]
        torch.testing.assert_close(attention_output(weights, record.values).transpose(1, 2), record.attention_output)


def test_flash_attentions_masks_are_written_out():
    """Its kernels need a GPU; what they do with masks does not."""
    query, key = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 10, 8)
    padding = torch.ones(2, 10, dtype=torch.long)
    padding[1, :4] = 0
    call = AttentionCall(nn.Identity(), query, key, key, padding, "flash_attention_2", {"sliding_window": 5})
    mask = visible(call, 2)
    expected = torch.zeros(2, 1, 2, 10, dtype=torch.bool)
    expected[0, 0, 0, 4:9], expected[0, 0, 1, 5:10] = True, True
    expected[1] = expected[0] & padding[1].bool()
    assert torch.equal(mask, expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models_are_recorded_exactly_and_weighed_in_float32(dtype):
    model = tiny_model("llama", dtype=dtype)
    plain = model(prompt()).logits
    with capture(model, window=4) as captured:
        assert torch.equal(model(prompt()).logits, plain)
    for record in captured:
        assert record.queries.dtype == dtype
        weights, _ = attention_weights(**record.inputs)
        assert weights.dtype == torch.float32
        error = attention_output(weights, record.values).transpose(1, 2) - record.attention_output.float()
        assert error.norm() < 4 * torch.finfo(dtype).eps * record.attention_output.float().norm()


def test_a_compiled_model_is_refused_with_what_to_do():
    model = tiny("llama")
    with pytest.raises(UnsupportedAttention, match="_orig_mod"), capture(torch.compile(model)):
        pass
    model.compile()
    with pytest.raises(UnsupportedAttention, match="is compiled"), capture(model):
        pass


@torch.no_grad()
def test_offloaded_records_lie_on_the_cpu_and_are_equal():
    model = tiny("llama")
    with capture(model, window=4) as kept, capture(model, window=4, offload=True) as moved:
        model(prompt())
    for one, other in zip(kept, moved, strict=True):
        assert other.keys.device.type == "cpu"
        assert torch.equal(one.queries, other.queries)


@torch.no_grad()
def test_with_a_visitor_nothing_of_earlier_layers_is_held():
    model, alive = tiny("llama"), []

    def visit(record):
        alive.append(weakref.ref(record.queries))
        gc.collect()
        assert [reference() is not None for reference in alive] == [False] * (len(alive) - 1) + [True]

    with capture(model, window=2, visitor=visit):
        model(prompt())
    assert len(alive) == 3


@torch.no_grad()
def test_layers_that_are_looped_are_told_apart_by_their_call():
    model = tiny_model("hrm_text")
    with capture(model, window=2) as captured:
        model(prompt())
    keys = [(record.name, record.call) for record in captured]
    assert len(set(keys)) == len(keys) > len({name for name, _ in keys})


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


@torch.no_grad()
def test_a_model_with_adapters_is_captured_and_its_w_o_includes_them():
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama", dtype=torch.float64)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], r=2, init_lora_weights=False))
    adapted.eval()
    plain = adapted(input_ids=prompt(2 * 8)).logits
    with capture(adapted, window=4) as captured:
        assert torch.equal(adapted(input_ids=prompt(2 * 8)).logits, plain)
    for record in captured:
        heads = attention_output(attention_weights(**record.inputs)[0], record.values)
        torch.testing.assert_close((heads @ record.projection_blocks).sum(1), record.projected_output)
    base = adapted.base_model.model.model.layers[0].self_attn.o_proj.base_layer.weight
    assert not torch.allclose(captured[0].projection_blocks.flatten(0, 1), base.t())


@torch.no_grad()
def test_a_model_whose_layers_are_loaded_when_they_run_is_captured():
    """Accelerate's offloading leaves weights on the meta device until their module is called."""
    from accelerate import cpu_offload

    model, plain = tiny_model("llama"), tiny_model("llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.o_proj.weight.is_meta
    with capture(model, window=4) as captured, capture(plain, window=4) as expected:
        assert torch.equal(model(prompt()).logits, plain(prompt()).logits)
    for record, other in zip(captured, expected, strict=True):
        assert torch.equal(record.queries, other.queries)
        torch.testing.assert_close(record.projection_blocks, other.projection_blocks)
