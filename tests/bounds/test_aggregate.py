"""From heads and queries to layers and windows: what is guaranteed, and what is not."""

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st
from strategies import problems, tolerance

from bounds import accumulated_bound, over_heads, over_window, projected_norms, theta, theta_o_hat
from perturbation import perturbation

NORMS = st.sampled_from([1, 2])


@given(problems(), NORMS, st.sampled_from(["group", "layer"]))
def test_the_sum_over_heads_bounds_the_error_of_their_sum(problem, norm, level):
    truth = perturbation(*problem.inputs, norm=norm, level=level)
    kv_heads = problem.keep.shape[1]
    allowed = tolerance(torch.float64, problem).sum(1, keepdim=True)
    norms = projected_norms(problem.values, problem.projection, norm=norm)
    for name, bound in (
        ("θ", theta(problem.weights, norms, problem.keep, problem.sink_mass)),
        ("θ_ô", theta_o_hat(*problem.inputs, norm=norm)),
    ):
        summed = over_heads(bound, kv_heads, level)
        target(float((truth / summed.clamp(min=1e-9)).max()), label=f"L over the sum of {name}")
        assert (truth <= summed + allowed).all()


@given(problems(), NORMS, st.sampled_from(["mean", "max"]), st.integers(0, 2**32 - 1))
def test_mean_and_maximum_over_the_window_bound_those_of_the_truth(problem, norm, how, seed):
    valid = torch.rand(problem.weights.shape[0], problem.weights.shape[2], generator=torch.Generator().manual_seed(seed)) < 0.7
    valid[:, -1] = True
    bound = theta(
        problem.weights, projected_norms(problem.values, problem.projection, norm=norm), problem.keep, problem.sink_mass
    )
    truth = perturbation(*problem.inputs, norm=norm)
    promised = over_window(bound, how, valid)
    allowed = tolerance(torch.float64, problem).amax(-1)
    for row in range(len(truth)):
        seen = truth[row][:, valid[row]]
        assert ((seen.mean(-1) if how == "mean" else seen.amax(-1)) <= promised[row] + allowed[row]).all()
    torch.testing.assert_close(over_window(bound, how), bound.mean(-1) if how == "mean" else bound.amax(-1))


@given(problems(), NORMS)
def test_accumulated_attention_alone_bounds_its_own_window(problem, norm):
    """Σ_E s_i (‖ν_i‖ + max_R ‖ν‖), with the mean over the window and with the maximum."""
    norms = projected_norms(problem.values, problem.projection, norm=norm)
    each = theta(problem.weights, norms, problem.keep, problem.sink_mass)
    for how, accumulated in (("mean", problem.weights.mean(2)), ("max", problem.weights.amax(2))):
        promised = accumulated_bound(accumulated, norms, problem.keep)
        inner = over_window(each, how)
        target(float((inner / promised.clamp(min=1e-9)).max()), label=f"θ over the accumulated bound, {how}")
        assert (inner <= promised * (1 + 1e-12) + 1e-300).all()


def test_theta_of_the_mean_attention_bounds_nothing():
    """Two queries: one on a kept entry that writes nothing, one on an evicted entry. The mean weights hide what the second loses."""
    weights = torch.tensor([[[[1.0, 0.0, 0.0], [0.0, 0.01, 0.99]]]]).double()
    values = torch.tensor([[[[0.0], [1.0], [0.0]]]]).double()
    blocks, keep = torch.ones(1, 1, 1).double(), torch.tensor([[[True, True, False]]])
    norms = projected_norms(values, blocks)
    truth = perturbation(weights, values, blocks, keep).mean(-1)
    assert float(theta(weights.mean(2, keepdim=True), norms, keep)) < 0.1 * float(truth)
    assert float(over_window(theta(weights, norms, keep))) >= float(truth)


def test_no_bound_over_a_window_bounds_a_later_query():
    """The window never looked at the evicted entry, so every bound is 0; the next query looks at nothing else."""
    window = torch.tensor([[[[0.5, 0.5, 0.0], [0.2, 0.8, 0.0]]]]).double()
    later = torch.tensor([[[[0.0, 0.0, 1.0]]]]).double()
    values, blocks = torch.tensor([[[[1.0], [2.0], [1e6]]]]).double(), torch.ones(1, 1, 1).double()
    keep = torch.tensor([[[True, True, False]]])
    norms = projected_norms(values, blocks)
    assert (theta(window, norms, keep) == 0).all()
    assert float(accumulated_bound(window.amax(2), norms, keep)) == 0
    assert float(perturbation(later, values, blocks, keep)) == 1e6


def test_what_cannot_be_aggregated_is_refused():
    bound = torch.ones(1, 3, 2)
    with pytest.raises(ValueError, match="3 heads do not divide into 2"):
        over_heads(bound, 2, "group")
    with pytest.raises(ValueError, match="no valid query"):
        over_window(bound, "mean", torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="not negative"):
        accumulated_bound(-torch.ones(1, 1, 3), torch.ones(1, 1, 1, 3), torch.ones(1, 1, 3, dtype=torch.bool))
