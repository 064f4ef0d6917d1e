"""Theorem 3.3 and its pieces, with σ on both sides of ½."""

import numpy as np
import oracles
import torch
from hypothesis import example, given, target
from hypothesis import strategies as st
from strategies import Problem, build, problems, tolerance

from bounds import audit, condition, constant, projected_norms, retained_mass, theta

NORMS = st.sampled_from([1, 2])
# found while this test was written: almost all attention on what is evicted, and values that nearly cancel
LIGHT = build(np.random.default_rng(7), 1, 2, 2, 3, 9, 4, 6, ("peaked", "cancelling", "light"), False)


def norms_of(problem: Problem, norm: float) -> torch.Tensor:
    return projected_norms(problem.values, problem.projection, norm=norm)


@given(problems(), NORMS, st.sampled_from([torch.float64, torch.float32]))
@example(LIGHT, 1, torch.float64)
@example(LIGHT, 2, torch.float32)
def test_perturbation_never_exceeds_theta(problem, norm, dtype):
    """L ≤ θ for every mask and every σ: no assumption on σ is needed."""
    full, evicted = oracles.outputs(problem)
    truth = torch.from_numpy(np.linalg.norm(full - evicted, ord=norm, axis=-1))
    cast = problem.to(dtype)
    bound = theta(cast.weights, norms_of(cast, norm), cast.keep, cast.sink_mass).double()
    target(float((truth / bound.clamp(min=1e-12)).max()), label="tightness of θ")
    assert (truth <= bound + tolerance(dtype, problem)).all()


@given(problems(), NORMS)
def test_theta_is_the_papers_formula(problem, norm):
    """θ = C − (2 − 1/σ) Σ_R A_i ‖ν_i‖, the subtractive form, in float64."""
    norms = norms_of(problem, norm)
    held = (problem.weights * problem.kept * norms).sum(-1)
    expected = constant(problem.weights, norms) - (2 - 1 / problem.sigma) * held
    got = theta(problem.weights, norms, problem.keep, problem.sink_mass)
    allowed = tolerance(torch.float64, problem)
    if not (problem.sink_mass > 0).any():
        assert ((got - expected).abs() <= allowed).all()
    else:  # with a sink 1 − σ is the evicted mass all the same, since the sink is kept
        lost = 1 - problem.sigma
        termwise = constant(problem.weights, norms) - held + lost / problem.sigma * held
        assert ((got - termwise).abs() <= allowed).all()


@given(problems())
def test_retained_mass_counts_kept_entries_and_the_sink(problem):
    torch.testing.assert_close(retained_mass(problem.weights, problem.keep, problem.sink_mass), problem.sigma)


@given(problems(), NORMS)
def test_above_one_half_keeping_more_lowers_theta_and_below_it_does_not(problem, norm):
    """At fixed σ the slope of θ in Σ_R A‖ν‖ is −(2 − 1/σ): negative exactly where the condition holds."""
    mass = retained_mass(problem.weights, problem.keep, problem.sink_mass)
    slope = -(2 - 1 / mass)
    assert ((slope < 0) == condition(mass)).all()


@given(problems(), NORMS)
def test_theta_is_zero_where_everything_is_kept(problem, norm):
    everything = torch.ones_like(problem.keep)
    assert (theta(problem.weights, norms_of(problem, norm), everything, problem.sink_mass) == 0).all()


@given(problems(), NORMS)
def test_theta_is_never_negative(problem, norm):
    assert (theta(problem.weights, norms_of(problem, norm), problem.keep, problem.sink_mass) >= 0).all()


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


def test_theta_is_infinite_where_nothing_that_was_looked_at_is_kept():
    weights, keep = torch.eye(2)[None, None], torch.tensor([[[True, False]]])
    assert theta(weights, torch.ones(1, 1, 1, 2), keep)[0, 0].tolist() == [0.0, torch.inf]


def test_theta_keeps_its_digits_at_large_budgets_in_float32():
    """Where a mass of 1e-8 goes, the subtractive form is noise (or negative) in float32; the termwise form is right."""
    weights = torch.full((1, 1, 1, 1000), 1 / 999)
    weights[..., -1] = 1e-8
    norms = torch.linspace(1, 2, 1000)[None, None, None]
    keep = torch.ones(1, 1, 1000, dtype=torch.bool)
    keep[..., -1] = False
    exact = theta(weights.double(), norms.double(), keep)
    torch.testing.assert_close(theta(weights, norms, keep).double(), exact, rtol=1e-5, atol=0)


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
    assert (found.tightness[moved] > 0.999).all()
    assert found.tightness[~moved].isnan().all()


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
