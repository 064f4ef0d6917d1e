"""SnapKV's scores equal its definition, computed in loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eviction.accumulate import SnapKV


@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([1, 3, 5]),
    st.sampled_from(["max", "mean", "none"]),
    st.integers(0, 2**32 - 1),
)
def test_scores_are_the_group_mean_of_the_pooled_window_mean(batch, heads, window, candidates, kernel, pooling, seed):
    kv_heads, group = heads
    keys = candidates + window
    weights = np.random.default_rng(seed).random((batch, kv_heads * group, window + 2, keys))
    got = SnapKV(window, kernel, pooling)(torch.from_numpy(weights), kv_heads)
    half = kernel // 2 if pooling != "none" else 0
    reduce = np.mean if pooling == "mean" else np.max
    for b, k, i in np.ndindex(batch, kv_heads, candidates):
        near = slice(max(0, i - half), min(candidates, i + half + 1))
        pooled = [reduce(weights[b, h, -window:, :candidates].mean(0)[near]) for h in range(k * group, (k + 1) * group)]
        np.testing.assert_allclose(got[b, k, i], np.mean(pooled), rtol=1e-12)


@pytest.mark.parametrize("settings", [{"window": 0}, {"kernel": 2}, {"kernel": 0}])
def test_parameters_outside_their_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        SnapKV(**settings)


def test_fewer_queries_than_the_window_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="window of 4 needs as many queries and more keys; got 3 queries, 9 keys"):
        SnapKV(window=4)(torch.ones(1, 1, 3, 9), 1)
