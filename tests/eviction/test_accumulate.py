"""Each accumulator equals its definition, computed in loops, with padded rows among them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from records import record

from eviction import Observation
from eviction.accumulate import H2O, TOVA, ExpectedAttention, KeyNorm, Random, SnapKV, StartRecent
from eviction.observation import recent

SHAPES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "kv_heads": st.integers(1, 2),
        "group": st.integers(1, 3),
        "queries": st.integers(1, 6),
        "keys": st.integers(7, 14),
        "pads": st.tuples(st.integers(0, 5), st.integers(0, 5)),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def attention(made):
    """Probabilities [batch, heads, queries, keys] by hand, and which queries are no pads."""
    queries, keys = made.queries.numpy(), made.keys.numpy()
    batch, heads, count, _ = queries.shape
    weights = np.zeros((batch, heads, count, keys.shape[2]))
    for b, h, t in np.ndindex(batch, heads, count):
        logits = keys[b, h // made.group] @ queries[b, h, t] * made.scale
        powers = np.where(made.mask[b, 0, t].numpy(), np.exp(logits - logits.max()), 0)
        weights[b, h, t] = powers / powers.sum()
    return weights, made.query_valid.numpy()


@given(
    SHAPES,
    st.integers(1, 4),
    st.sampled_from([1, 3, 5]),
    st.sampled_from(["max", "mean", "none"]),
    st.sampled_from(["mean", "max"]),
)
def test_snapkv_is_the_pooled_attention_of_the_window(shape, window, kernel, pooling, over):
    made = record(**shape)
    seen = Observation(made)
    protected = recent(seen.valid, window)
    got = SnapKV(window, kernel, pooling, over)(seen, protected)
    weights, valid = attention(made)
    half = kernel // 2 if pooling != "none" else 0
    reduce = (lambda near: np.sum(near) / kernel) if pooling == "mean" else np.max  # 0 beyond the ends
    for b, h in np.ndindex(*weights.shape[:2]):
        looking = [t for t in range(weights.shape[2])[-window:] if valid[b, t]]
        scores = getattr(np, over)(weights[b, h, looking], axis=0)
        scored = [i for i in range(made.n_keys) if seen.valid[b, 0, i] and not protected[b, 0, i]]
        for i in scored:
            near = [scores[j] for j in range(i - half, i + half + 1) if j in scored]
            np.testing.assert_allclose(got[b, h, i], reduce(near), rtol=1e-10)


@given(SHAPES)
def test_h2o_is_the_sum_over_all_queries_and_tova_the_last_over_all_heads(shape):
    made = record(**{**shape, "queries": shape["keys"]})
    seen = Observation(made)
    weights, valid = attention(made)
    summed = (weights * valid[:, None, :, None]).sum(2)
    nothing = torch.zeros_like(seen.valid)
    np.testing.assert_allclose(H2O()(seen, nothing), summed, rtol=1e-10)
    np.testing.assert_allclose(TOVA(over_heads="head")(seen, nothing), weights[:, :, -1], rtol=1e-10)
    mean = weights[:, :, -1].mean(1, keepdims=True)
    np.testing.assert_allclose(TOVA()(seen, nothing), np.broadcast_to(mean, weights[:, :, -1].shape), rtol=1e-10)


def test_h2o_sums_blocks_of_queries_to_the_same(monkeypatch):
    made = record(queries=24)
    whole = H2O()(Observation(made), torch.zeros(1, 1, 24, dtype=torch.bool))
    monkeypatch.setattr("eviction.accumulate.h2o.BLOCK", 5)
    torch.testing.assert_close(H2O()(Observation(made), torch.zeros(1, 1, 24, dtype=torch.bool)), whole)


@given(SHAPES, st.integers(1, 6))
def test_expected_attention_is_the_gaussian_mean_of_the_exponential(shape, window):
    made = record(**shape)
    seen = Observation(made)
    got = ExpectedAttention(window=window)(seen, torch.zeros_like(seen.valid))
    for b, h in np.ndindex(*made.queries.shape[:2]):
        looking = [t for t in range(made.n_queries)[-window:] if made.query_valid[b, t]]
        queries = made.queries[b, h, looking].numpy()
        mean, covariance = queries.mean(0), np.cov(queries.T, bias=True).reshape(4, 4)
        keys = made.keys[b, h // made.group].numpy()
        logits = np.array([made.scale * key @ mean + made.scale**2 / 2 * key @ covariance @ key for key in keys])
        powers = np.where(seen.valid[b, 0], np.exp(logits - logits.max()), 0)
        np.testing.assert_allclose(got[b, h], powers / powers.sum(), rtol=1e-8)


@given(SHAPES)
def test_key_norm_ranks_small_keys_first_and_start_recent_late_ones(shape):
    made = record(**shape)
    seen = Observation(made)
    nothing = torch.zeros_like(seen.valid)
    norms = made.keys.norm(dim=-1).repeat_interleave(made.group, 1)
    assert torch.equal(KeyNorm()(seen, nothing).argsort(-1, descending=True), norms.argsort(-1))
    late = StartRecent()(seen, nothing)
    assert (late.diff(dim=-1)[seen.valid[..., 1:].expand_as(late[..., 1:])] > 0).all()


def test_random_is_seeded_by_seed_and_layer_and_shared_by_a_group():
    nothing = torch.zeros(1, 1, 24, dtype=torch.bool)
    one, same, other = (Random(seed=seed)(Observation(record()), nothing) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one, Random(seed=3)(Observation(record(layer=1)), nothing))
    assert torch.equal(one[:, 0], one[:, 1])


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (SnapKV, {"window": 0}),
        (SnapKV, {"kernel": 2}),
        (SnapKV, {"pooling": "median"}),
        (SnapKV, {"over": "sum"}),
        (H2O, {"recent": -1}),
        (TOVA, {"over_heads": "all"}),
        (ExpectedAttention, {"window": 0}),
        (KeyNorm, {"recent": -1}),
        (StartRecent, {"sink": -1}),
        (Random, {"seed": -1}),
    ],
)
def test_parameters_outside_their_range_are_refused_with_their_name(cls, settings):
    with pytest.raises((ValueError, TypeError), match=next(iter(settings))):
        cls(**settings)
