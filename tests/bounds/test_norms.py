"""‖ν‖ in blocks and without projecting equals ‖ν‖ by definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

from bounds import projected_norms


@given(problems(), st.sampled_from([1, 2, 3, float("inf")]), st.integers(1, 4))
def test_norms_in_blocks_equal_the_definition(problem, norm, block):
    got = projected_norms(problem.values, problem.projection, norm=norm, block=block)
    values, projection = problem.values.numpy(), problem.projection.numpy()
    for b, h, _, i in np.ndindex(*got.shape):
        expected = np.linalg.norm(values[b, h // problem.group, i] @ projection[h], ord=norm)
        size = np.abs(values[b, h // problem.group, i]) @ np.abs(projection[h]).sum(-1)
        assert abs(float(got[b, h, 0, i]) - expected) <= 1e-13 * size


def test_a_value_that_w_o_annihilates_has_no_l2_norm_in_float32():
    """The Gram matrix would leave √ε of it, 3e-4; the triangular factor leaves ε."""
    projection = torch.tensor([[[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]])
    values = torch.tensor([[[[1.0, -1.0]]]])
    assert float(projected_norms(values, projection, norm=2)) < 1e-6


def test_no_more_than_a_block_of_projected_values_exists_at_once():
    """64 MB of ν if it were whole; the peak must stay at a few blocks of it."""
    values, projection = torch.randn(1, 2, 8192, 16), torch.randn(4, 16, 512)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.numel())
            return result

    with Watch():
        projected_norms(values, projection)
    assert max(sizes) <= 4 * 512 * 512


def test_low_precision_values_give_float32_norms():
    values = torch.randn(1, 1, 4, 8, dtype=torch.bfloat16)
    projection = torch.randn(2, 8, 16, dtype=torch.bfloat16)
    got = projected_norms(values, projection)
    assert got.dtype == torch.float32
    expected = (values.double()[:, :, None] @ projection.double()).abs().sum(-1).flatten(1, 2)[:, :, None]
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)


def test_shapes_that_do_not_fit_are_refused_with_both():
    with pytest.raises(ValueError, match=r"values .2 KV heads, value_dim 4. do not fit W_O .3 heads, value_dim 4."):
        projected_norms(torch.ones(1, 2, 5, 4), torch.ones(3, 4, 6))
