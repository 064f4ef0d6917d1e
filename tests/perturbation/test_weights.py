"""Attention weights recomputed from queries and keys equal a float64 softmax done by hand."""

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perturbation import attention_weights


@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    st.integers(1, 3),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([None, 3.0]),
    st.booleans(),
    st.sampled_from(["bool", "additive"]),
    st.integers(0, 2**32 - 1),
)
def test_weights_equal_a_softmax_by_hand(batch, heads, queries, keys, masked, softcap, with_sinks, form, seed):
    rng = np.random.default_rng(seed)
    q = torch.from_numpy(rng.normal(size=(batch, heads[0], queries, 4)) * 3)
    k = torch.from_numpy(rng.normal(size=(batch, heads[1], keys, 4)))
    visible = None
    mask = None
    if masked:
        visible = rng.random((batch, heads[0], queries, keys)) < 0.6
        visible[..., rng.integers(keys)] = True
        mask = torch.from_numpy(visible)
        if form == "additive":
            mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    sinks = torch.from_numpy(rng.normal(size=heads[0])) if with_sinks else None
    got, sink_mass = attention_weights(q, k, scale=0.7, mask=mask, softcap=softcap, sinks=sinks)
    expected, expected_sink = oracles.attention(q, k, 0.7, visible, softcap, sinks)
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(sink_mass, expected_sink, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(got.sum(-1) + sink_mass, torch.ones_like(sink_mass))
    if visible is not None:
        assert (got.numpy()[~visible] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_give_float32_weights(dtype):
    weights, _ = attention_weights(torch.randn(1, 2, 3, 8, dtype=dtype), torch.randn(1, 1, 5, 8, dtype=dtype), scale=1.0)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 3))


def test_a_query_that_sees_nothing_is_refused():
    hidden = torch.tensor([[[[True, True], [False, False]]]])
    with pytest.raises(ValueError, match="sees no entry"):
        attention_weights(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), scale=1.0, mask=hidden)


def test_heads_that_kv_heads_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 query heads do not divide evenly over 2 KV heads"):
        attention_weights(torch.ones(1, 3, 1, 4), torch.ones(1, 2, 2, 4), scale=1.0)
