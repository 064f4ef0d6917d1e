"""The audit holds each promise against the truth, and can say no."""

import numpy as np
import oracles
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import Problem, problems, tolerance

from bounds import audit, audit_curve, bound_curve, projected_norms, retained_mass, theta
from perturbation import ranking

NORMS = st.sampled_from([1, 2])


@given(problems(), NORMS, st.integers(0, 2**32 - 1))
def test_with_a_gate_before_w_o_truth_and_bound_are_those_of_each_querys_own_projection(problem, norm, seed):
    """(g_t ⊙ v) W = v (diag(g_t) W): a gated head is an ungated one for each query."""
    gate = torch.randn(
        *problem.weights.shape[:3], problem.values.shape[3], generator=torch.Generator().manual_seed(seed)
    ).double()
    found = audit(problem.weights, problem.values, problem.projection, problem.keep, problem.sink_mass, norm=norm, gate=gate)
    assert found.violations == 0
    for b, h, t in np.ndindex(*gate.shape[:3]):
        projection = problem.projection.clone()
        projection[h] = gate[b, h, t, :, None] * projection[h]
        row = slice(b, b + 1)
        alone = audit(
            problem.weights[row], problem.values[row], projection, problem.keep[row], problem.sink_mass[row], norm=norm
        )
        torch.testing.assert_close(found.perturbation[b, h, t], alone.perturbation[0, h, t])
        torch.testing.assert_close(found.theta[b, h, t], alone.theta[0, h, t])


# found by a long run: parallel values, so that L = θ, which W_O all but annihilates, so that rounding is not relative to θ
PARALLEL = Problem(
    weights=torch.full((1, 1, 1, 2), 0.21335).double(),
    sink_mass=torch.full((1, 1, 1), 0.5733).double(),
    values=torch.tensor([[[[-0.8105, -0.9701], [-0.3985, -0.4769815]]]]).double(),
    projection=torch.tensor([[[-0.1295, 0.6410], [0.1081, -0.5350]]]).double(),
    keep=torch.tensor([[[True, False]]]),
)


@given(problems(), NORMS)
@example(PARALLEL, 1)
def test_audit_finds_no_violation_and_reports_truth_bound_and_condition(problem, norm):
    full, evicted = oracles.outputs(problem)
    found = audit(problem.weights, problem.values, problem.projection, problem.keep, problem.sink_mass, norm=norm)
    np.testing.assert_allclose(found.perturbation, np.linalg.norm(full - evicted, ord=norm, axis=-1), atol=1e-10)
    torch.testing.assert_close(found.retained_mass, problem.sigma)
    assert (found.condition == (found.retained_mass > 0.5)).all()
    assert found.violations == 0
    moved = found.perturbation > 0
    assert (found.tightness <= 1 + 1e-9).all()
    assert (found.tightness >= 0).all()
    assert (found.tightness[~moved] == torch.where(found.theta[~moved] > 0, 0.0, 1.0)).all()


def test_audit_in_float32_finds_no_violation_in_large_random_layers():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 6, 16, 512, generator=generator).mul(3).softmax(-1)
    values = torch.randn(2, 3, 512, 32, generator=generator)
    projection = torch.randn(6, 32, 96, generator=generator)
    for share in (0.02, 0.5, 0.98):
        keep = torch.rand(2, 3, 512, generator=generator) < share
        for norm in (1, 2):
            assert audit(weights, values, projection, keep, norm=norm).violations == 0


def test_audit_reports_a_broken_bound():
    """A bound made from norms that are too small is caught: the audit can say no."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1, 2, 3, 16, generator=generator).softmax(-1)
    values = torch.randn(1, 2, 16, 4, generator=generator)
    projection = torch.randn(2, 4, 8, generator=generator)
    keep = torch.rand(1, 2, 16, generator=generator) < 0.3
    norms = projected_norms(values, projection) * 1e-3
    assert audit(weights, values, projection, keep, value_norms=norms).violations == 6


@given(problems(), NORMS, st.sampled_from([torch.float64, torch.float32]))
@example(PARALLEL, 1, torch.float32)
def test_audit_finds_every_link_of_the_chain_in_place(problem, norm, dtype):
    """L ≤ θ_ô ≤ Σ_E A ‖ν‖ + (1 − σ) ‖ô‖ ≤ θ."""
    found = audit(*problem.to(dtype).inputs, norm=norm, centred=True)
    assert found.violations == 0
    assert found.theta_o_hat.isfinite().all()
    assert found.origin.isfinite().all()


def parallel_problem(keys: int, kept: int) -> tuple:
    """L = θ: what is kept and what is evicted write in opposite directions."""
    weights = torch.full((1, 1, 1, keys), 1 / keys)
    values = torch.ones(1, 1, keys, 1)
    values[..., kept:, :] = -1
    return weights, values, torch.ones(1, 1, 4), (torch.arange(keys) < kept)[None, None]


@pytest.mark.parametrize("keys", [8, 64, 512])
def test_audit_notices_a_bound_that_is_2_per_cent_too_small(keys):
    weights, values, blocks, keep = parallel_problem(keys, keys // 2)
    norms = projected_norms(values, blocks)
    whole = audit(weights, values, blocks, keep, value_norms=norms)
    assert whole.violations == 0
    torch.testing.assert_close(whole.perturbation, whole.theta)
    assert audit(weights, values, blocks, keep, value_norms=0.98 * norms).violations == 1
    order = torch.arange(keys)[None, None]
    assert audit_curve(weights, values, blocks, order, [keys // 2], value_norms=norms).violations == 0
    assert audit_curve(weights, values, blocks, order, [keys // 2], value_norms=0.98 * norms).violations == 1


@given(problems(), NORMS, st.integers(0, 2**32 - 1))
def test_the_audit_of_a_curve_is_the_audit_of_each_budget(problem, norm, seed):
    scores = torch.randint(0, 4, problem.keep.shape, generator=torch.Generator().manual_seed(seed))
    order = ranking(scores)
    budgets = list(range(1, order.shape[-1] + 1))
    curve = audit_curve(problem.weights, problem.values, problem.projection, order, budgets, problem.sink_mass, norm=norm)
    assert curve.violations == 0
    for index, budget in enumerate(budgets):
        keep = torch.zeros_like(problem.keep).scatter(-1, order[..., :budget], True)
        alone = audit(problem.weights, problem.values, problem.projection, keep, problem.sink_mass, norm=norm)
        allowed = tolerance(
            torch.float64, Problem(problem.weights, problem.sink_mass, problem.values, problem.projection, keep)
        )
        assert ((curve.perturbation[index] - alone.perturbation).abs() <= allowed).all()
        assert ((curve.theta[index] - alone.theta).abs() <= allowed).all()
        torch.testing.assert_close(curve.retained_mass[index], alone.retained_mass)


@given(problems(), NORMS, st.integers(0, 2**32 - 1), st.data())
def test_theta_and_mass_at_every_budget_of_a_ranking_are_those_of_its_masks(problem, norm, seed, data):
    order = torch.rand(problem.keep.shape, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    budgets = data.draw(st.lists(st.integers(1, order.shape[-1]), min_size=1, max_size=4))
    norms = projected_norms(problem.values, problem.projection, norm=norm)
    curve = bound_curve(problem.weights, norms, order, budgets, problem.sink_mass)
    for index, budget in enumerate(budgets):
        keep = torch.zeros_like(problem.keep).scatter(-1, order[..., :budget], True)
        torch.testing.assert_close(curve.theta[index], theta(problem.weights, norms, keep, problem.sink_mass))
        torch.testing.assert_close(curve.retained_mass[index], retained_mass(problem.weights, keep, problem.sink_mass))


@given(problems(), NORMS, st.integers(0, 2**32 - 1))
def test_a_curve_in_float32_breaks_no_bound_however_little_is_left(problem, norm, seed):
    problem = problem.to(torch.float32)
    order = torch.rand(problem.keep.shape, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    budgets = list(range(1, order.shape[-1] + 1))
    curve = audit_curve(problem.weights, problem.values, problem.projection, order, budgets, problem.sink_mass, norm=norm)
    assert curve.violations == 0
    for index, budget in enumerate(budgets):
        keep = torch.zeros_like(problem.keep).scatter(-1, order[..., :budget], True)
        exact = Problem(problem.weights, problem.sink_mass, problem.values, problem.projection, keep).to(torch.float64)
        alone = audit(*exact.inputs, norm=norm)
        allowed = tolerance(torch.float32, exact) + 1e-18
        assert ((curve.perturbation[index] - alone.perturbation).abs() <= allowed).all()
        assert ((curve.theta[index] - alone.theta).abs() <= allowed).all()


def test_a_curve_where_everything_kept_is_subnormal_keeps_its_digits():
    weights = torch.tensor([[[[1e-42, 3e-42, 1.0]]]])
    values, blocks = torch.tensor([[[[0.3], [0.2], [-0.5]]]]), torch.ones(1, 1, 2)
    found = audit_curve(weights, values, blocks, torch.arange(3)[None, None], [1, 2])
    exact = audit_curve(weights.double(), values.double(), blocks.double(), torch.arange(3)[None, None], [1, 2])
    torch.testing.assert_close(found.perturbation.double(), exact.perturbation, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.theta.double(), exact.theta, rtol=1e-6, atol=0)
    assert found.violations == 0


def test_an_audit_in_a_norm_in_which_it_could_notice_nothing_is_refused():
    weights, values, blocks, keep = parallel_problem(8, 4)
    with pytest.raises(ValueError, match="p = 20"):
        audit(weights, values, blocks, keep, norm=20)
    assert audit(weights, values, blocks, keep, norm=torch.inf).violations == 0
