"""Theorem 3.3 and its pieces, with σ on both sides of ½."""

from itertools import combinations

import numpy as np
import oracles
import torch
from hypothesis import example, given, target
from hypothesis import strategies as st
from strategies import Problem, build, problems, tolerance

from bounds import condition, constant, projected_norms, relaxed, retained_mass, theta, theta_hat, theta_o

NORMS = st.sampled_from([1, 2])
SEEDS = st.integers(0, 2**32 - 1)
# found while this test was written: almost all attention on what is evicted, and values that nearly cancel
LIGHT = build(np.random.default_rng(7), 1, 2, 2, 3, 9, 4, 6, ("peaked", "cancelling", "light"), False)


def norms_of(problem: Problem, norm: float) -> torch.Tensor:
    return projected_norms(problem.values, problem.projection, norm=norm)


@given(problems(), NORMS, st.sampled_from([torch.float64, torch.float32]))
@example(LIGHT, 1, torch.float64)
@example(LIGHT, 2, torch.float32)
def test_perturbation_never_exceeds_theta(problem, norm, dtype):
    """L ≤ θ for every mask and every σ, 0 included: no assumption on σ is needed."""
    problem = problem.to(dtype)
    full, evicted = oracles.outputs(problem)
    truth = torch.from_numpy(np.linalg.norm(full - evicted, ord=norm, axis=-1))
    bound = theta(problem.weights, norms_of(problem, norm), problem.keep, problem.sink_mass).double()
    target(float((truth / bound.clamp(min=1e-12)).max()), label="tightness of θ")
    assert (truth <= bound + tolerance(dtype, problem)).all()


@given(problems(blind=False), NORMS)
def test_theta_is_the_papers_formula_in_rational_numbers(problem, norm):
    """θ = C − (2 − 1/σ) Σ_R A_i ‖ν_i‖, the subtractive form, where the weights sum to 1 − a0 as the form takes for granted."""
    norms = norms_of(problem, norm)
    got = theta(problem.weights, norms, problem.keep, problem.sink_mass)
    for b, h, t in np.ndindex(*got.shape):
        weights, keep = problem.weights[b, h, t], problem.keep[b, h // problem.group]
        sink, sizes = problem.sink_mass[b, h, t], norms[b, h, 0]
        expected = float(oracles.exact_theta(weights, sink, sizes, keep.tolist()))
        # 1/σ − 1 and (1 − σ)/σ differ by the weights' rounding, over σ
        allowed = 1e-14 * (len(weights) + 4) * float(weights @ sizes) / float(problem.sigma[b, h, t])
        assert abs(float(got[b, h, t]) - expected) <= allowed + 1e-300


@given(problems())
def test_retained_mass_counts_kept_entries_and_the_sink(problem):
    torch.testing.assert_close(retained_mass(problem.weights, problem.keep, problem.sink_mass), problem.sigma)


@given(problems(sinks=True), st.floats(0, 3), st.floats(0.01, 3))
def test_above_one_half_a_larger_kept_value_lowers_theta_and_below_it_raises_theta(problem, size, more):
    """The slope of θ in Σ_R A‖ν‖ at fixed C and σ is −(2 − 1/σ): two entries of equal weight, one of them kept, swap their norms."""
    weights = problem.weights[:1, :1, :1, :1] / 2
    pair = torch.cat([weights, weights, 1 - 2 * weights], -1)
    sigma = float(1 - weights)
    large = torch.tensor([[[[size + more, size, 1.0]]]]).double()
    small = torch.tensor([[[[size, size + more, 1.0]]]]).double()
    for keep, mass in (([True, False, True], sigma), ([True, False, False], float(weights))):
        mask = torch.tensor([[keep]])
        with_large, with_small = theta(pair, large, mask), theta(pair, small, mask)
        assert bool(condition(retained_mass(pair, mask)).all()) == (mass > 0.5)
        if abs(mass - 0.5) > 1e-6 and float(weights) > 1e-9:
            assert bool((with_large < with_small).all()) == (mass > 0.5)


@given(problems(), NORMS)
def test_theta_is_zero_where_everything_is_kept(problem, norm):
    everything = torch.ones_like(problem.keep)
    assert (theta(problem.weights, norms_of(problem, norm), everything, problem.sink_mass) == 0).all()


@given(problems(), NORMS)
def test_theta_is_never_negative(problem, norm):
    assert (theta(problem.weights, norms_of(problem, norm), problem.keep, problem.sink_mass) >= 0).all()


@given(problems(blind=True), NORMS)
def test_theta_is_the_constant_where_nothing_that_was_looked_at_is_kept(problem, norm):
    norms = norms_of(problem, norm)
    bound = theta(problem.weights, norms, problem.keep, problem.sink_mass)
    blind = problem.sigma == 0
    torch.testing.assert_close(bound[blind], constant(problem.weights, norms)[blind])


@given(problems(), NORMS, st.sampled_from([torch.float64, torch.float32, torch.float16]))
def test_no_bound_is_infinite_nan_or_negative(problem, norm, dtype):
    problem = problem.to(dtype)
    norms = norms_of(problem, norm)
    inputs = (problem.weights, norms, problem.keep)
    for bound in (
        theta(*inputs, problem.sink_mass),
        relaxed(*inputs, problem.sink_mass),
        theta_hat(*inputs, problem.keep & False, problem.sink_mass) if (problem.sink_mass > 0).all() else constant(*inputs[:2]),
        constant(*inputs[:2]),
        retained_mass(problem.weights, problem.keep, problem.sink_mass),
    ):
        assert bound.isfinite().all()
        assert (bound >= 0).all()
        assert bound.dtype in (torch.float32, torch.float64)


def stage1_of(problem, seed):
    """A part of what is kept."""
    return problem.keep & (torch.rand(problem.keep.shape, generator=torch.Generator().manual_seed(seed)) < 0.6)


@given(problems(), NORMS, SEEDS, st.sampled_from([torch.float64, torch.float32]))
def test_theta_hat_never_lies_below_theta(problem, norm, seed, dtype):
    """θ̂ ≥ θ since σ₁ ≤ σ, wherever stage 1 holds anything; and its stand-in where it holds nothing."""
    problem = problem.to(dtype)
    norms = norms_of(problem, norm)
    bound = theta(problem.weights, norms, problem.keep, problem.sink_mass)
    hat = theta_hat(problem.weights, norms, problem.keep, stage1_of(problem, seed), problem.sink_mass)
    target(float((bound / hat.clamp(min=1e-12)).max()), label="θ over θ̂")
    assert (bound <= hat * (1 + 100 * torch.finfo(dtype).eps) + 1e-30).all()
    assert hat.isfinite().all()


@given(problems(blind=False), NORMS)
def test_theta_hat_after_a_stage_1_that_chose_everything_is_theta(problem, norm):
    norms = norms_of(problem, norm)
    inputs = (problem.weights, norms, problem.keep)
    torch.testing.assert_close(theta_hat(*inputs, problem.keep, problem.sink_mass), theta(*inputs, problem.sink_mass))


@given(problems(blind=False), NORMS, SEEDS)
def test_theta_hat_is_the_papers_formula(problem, norm, seed):
    """θ̂ = C − (2 − 1/σ₁) Σ_R A ‖ν‖."""
    norms, stage1 = norms_of(problem, norm), stage1_of(problem, seed)
    group = problem.group
    mass = problem.sink_mass + (problem.weights * stage1.repeat_interleave(group, 1)[:, :, None]).sum(-1)
    held = (problem.weights * problem.kept * norms).sum(-1)
    lost = (problem.weights * ~problem.kept * norms).sum(-1)
    clear = mass > 1e-3
    expected = constant(problem.weights, norms) - (2 - 1 / mass.clamp(min=1e-3)) * held
    got = theta_hat(problem.weights, norms, problem.keep, stage1, problem.sink_mass)
    torch.testing.assert_close(got[clear], expected[clear], rtol=1e-9, atol=1e-9)
    nothing = mass == 0
    largest = (norms * problem.kept).amax(-1)
    torch.testing.assert_close(got[nothing], (lost + largest)[nothing])


@given(problems(blind=False), NORMS, SEEDS, st.data())
def test_stage_2_by_a_times_norm_minimises_theta_hat_above_one_half_and_maximises_it_below(problem, norm, seed, data):
    """Against every other stage-2 choice of the same size, one head and query at a time."""
    weights, sink = problem.weights[:1, :1, :1], problem.sink_mass[:1, :1, :1]
    norms, keys = norms_of(problem, norm)[:1, :1], problem.keep.shape[-1]
    stage1 = problem.keep[:1, :1] & (torch.rand(1, 1, keys, generator=torch.Generator().manual_seed(seed)) < 0.8)
    mass = float(sink + (weights * stage1[:, :, None]).sum(-1))
    rest = (~stage1).flatten().nonzero().flatten().tolist()
    if mass == 0 or not rest:
        return
    count = data.draw(st.integers(1, len(rest)))

    def value(chosen):
        keep = stage1.clone()
        keep[..., list(chosen)] = True
        return float(theta_hat(weights, norms, keep, stage1, sink))

    products = (weights * norms).flatten()
    top = value(sorted(rest, key=lambda i: -float(products[i]))[:count])
    others = [value(choice) for choice in combinations(rest, count)]
    scale = 1e-12 * (1 + float(products.sum()) / mass)
    if mass > 0.5:
        assert top <= min(others) + scale
    elif mass < 0.5:
        assert top >= max(others) - scale


@given(problems(), NORMS, st.data())
def test_the_relaxed_bound_is_above_theta_and_attention_only_minimises_it(problem, norm, data):
    """2 M (1 − σ) ≥ θ; and no other choice of the same size has less of it than the top b of A."""
    norms = norms_of(problem, norm)
    bound = relaxed(problem.weights, norms, problem.keep, problem.sink_mass)
    low = theta(problem.weights, norms, problem.keep, problem.sink_mass)
    target(float((low / bound.clamp(min=1e-12)).max()), label="θ over 2M(1 − σ)")
    assert (low <= bound * (1 + 1e-12) + 1e-300).all()
    weights, sink, keys = problem.weights[:1, :1, :1], problem.sink_mass[:1, :1, :1], problem.keep.shape[-1]
    budget = data.draw(st.integers(1, keys))

    def value(chosen):
        keep = torch.zeros(1, 1, keys, dtype=torch.bool)
        keep[..., list(chosen)] = True
        return float(relaxed(weights, norms[:1, :1], keep, sink))

    top = value(weights.flatten().argsort(descending=True, stable=True)[:budget].tolist())
    assert top <= min(value(choice) for choice in combinations(range(keys), budget)) * (1 + 1e-9) + 1e-12


def test_subnormal_mass_overflows_nothing():
    """σ = 1e-42: 1/σ is infinite in float32, θ is not."""
    weights = torch.tensor([[[[1e-42, 1.0]]]])
    keep, norms = torch.tensor([[[True, False]]]), torch.tensor([[[[3.0, 2.0]]]])
    torch.testing.assert_close(theta(weights, norms, keep), torch.full((1, 1, 1), 5.0), rtol=1e-2, atol=0)
    assert theta_hat(weights, norms, keep, keep).isfinite().all()
    assert theta_o(weights, torch.tensor([[[[3.0], [2.0]]]]), torch.ones(1, 1, 1), keep).isfinite().all()


def test_theta_keeps_its_digits_at_large_budgets_in_float32():
    """Where a mass of 1e-8 goes, the subtractive form is noise (or negative) in float32; the termwise form is right."""
    weights = torch.full((1, 1, 1, 1000), 1 / 999)
    weights[..., -1] = 1e-8
    norms = torch.linspace(1, 2, 1000)[None, None, None]
    keep = torch.ones(1, 1, 1000, dtype=torch.bool)
    keep[..., -1] = False
    exact = theta(weights.double(), norms.double(), keep)
    torch.testing.assert_close(theta(weights, norms, keep).double(), exact, rtol=1e-5, atol=0)
