"""The shift family and θ_ô: valid always, and never above θ."""

import numpy as np
import oracles
import torch
from hypothesis import given, target
from hypothesis import strategies as st
from strategies import problems, tolerance, with_pads

from bounds import projected_distances, projected_norms, shifted, theta, theta_o, theta_o_hat
from perturbation import attention_output, evicted_output

NORMS = st.sampled_from([1, 2, 3])
DTYPES = st.sampled_from([torch.float64, torch.float32])
SEEDS = st.integers(0, 2**32 - 1)


def truth_of(problem, norm):
    full, evicted = oracles.outputs(problem)
    return torch.from_numpy(np.linalg.norm(full - evicted, ord=norm, axis=-1))


def points(problem, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    shape = (*problem.weights.shape[:3], problem.values.shape[3])
    return size * torch.randn(*shape, generator=generator).to(problem.weights.dtype)


def naive_shifted(problem, norm, reference):
    """Σ_E A ‖ν − c‖ + (1 − σ) ‖ô − c‖ in loops; `reference` maps (A, a0, kept, ν) to c in the residual stream."""

    def bound(weights, sink, keep, written):
        sigma = sink + weights[keep].sum()
        left = weights[keep] @ written[keep] / sigma if sigma > 0 else 0 * written[0]
        point = reference(weights, sigma, keep, written, left)
        lost = sum(a * np.linalg.norm(v - point, ord=norm) for a, v in zip(weights[~keep], written[~keep], strict=True))
        return lost + weights[~keep].sum() * np.linalg.norm(left - point, ord=norm)

    return torch.from_numpy(oracles.per_query(problem, bound))


def allowed_around(dtype, problem, reference):
    """Rounding, and what distances formed around the mean of a head's references add to it."""
    exact = problem.to(torch.float64)
    centre = reference.double().abs().mean(2, keepdim=True)
    own = (centre + reference.double().abs()) @ exact.projection.abs().sum(-1)[None, :, :, None]
    terms = 8 * (problem.values.shape[2] + problem.values.shape[3] + problem.projection.shape[2])
    lost = (exact.weights * ~problem.kept).sum(-1)
    return tolerance(dtype, problem) + terms * torch.finfo(dtype).eps * lost * own.squeeze(-1)


def around_o_hat(dtype, problem):
    return allowed_around(dtype, problem, evicted_output(problem.weights, problem.values, problem.keep, problem.sink_mass))


def aim(truth, bound):
    target(float((truth / bound.double().clamp(min=1e-9)).max()), label="L over the bound")


@given(problems(), NORMS, DTYPES, SEEDS, st.sampled_from([0.0, 1.0, 100.0]))
def test_perturbation_never_exceeds_the_shift_family_at_any_point(problem, norm, dtype, seed, size):
    problem = problem.to(dtype)
    point = points(problem, seed, size)
    bound = shifted(*problem.inputs[:4], point, problem.sink_mass, norm=norm)
    truth = truth_of(problem, norm)
    aim(truth, bound)
    assert (truth <= bound.double() + allowed_around(dtype, problem, point)).all()


@given(problems(), NORMS, DTYPES)
def test_perturbation_never_exceeds_theta_o_hat(problem, norm, dtype):
    problem = problem.to(dtype)
    bound = theta_o_hat(*problem.inputs, norm=norm)
    truth = truth_of(problem, norm)
    aim(truth, bound)
    assert (truth <= bound.double() + around_o_hat(dtype, problem)).all()


@given(problems(), NORMS, DTYPES)
def test_theta_o_hat_never_exceeds_the_family_at_0_and_that_never_theta(problem, norm, dtype):
    """θ_ô ≤ Σ_E A ‖ν‖ + (1 − σ) ‖ô‖ ≤ θ: the centred bound beats the paper's, σ ≤ ½ included."""
    problem = problem.to(dtype)
    inner = theta_o_hat(*problem.inputs, norm=norm)
    origin = shifted(*problem.inputs[:4], 0 * points(problem, 0), problem.sink_mass, norm=norm)
    outer = theta(
        problem.weights, projected_norms(problem.values, problem.projection, norm=norm), problem.keep, problem.sink_mass
    )
    target(float((inner / outer.clamp(min=1e-9)).max()), label="θ_ô over θ")
    allowed = around_o_hat(dtype, problem)
    assert (inner <= origin + allowed).all()
    assert (origin <= outer + allowed).all()


@given(problems(), NORMS, SEEDS)
def test_theta_o_hat_is_the_least_of_the_shift_family(problem, norm, seed):
    inner = theta_o_hat(*problem.inputs, norm=norm)
    point = points(problem, seed)
    other = shifted(*problem.inputs[:4], point, problem.sink_mass, norm=norm)
    target(float((inner / other.clamp(min=1e-9)).max()), label="θ_ô over the family")
    allowed = around_o_hat(torch.float64, problem) + allowed_around(torch.float64, problem, point)
    assert (inner <= other + allowed).all()


@given(problems(blind=False), NORMS, DTYPES)
def test_perturbation_never_exceeds_theta_o(problem, norm, dtype):
    problem = problem.to(dtype)
    bound = theta_o(*problem.inputs, norm=norm).double()
    truth = truth_of(problem, norm)
    aim(truth, bound)
    sigma = problem.to(torch.float64).sigma.clamp(min=1e-30, max=1)
    whole = attention_output(problem.weights, problem.values)
    assert (truth <= bound + allowed_around(dtype, problem, whole) / sigma).all()


@given(problems(blind=True), NORMS)
def test_where_nothing_is_left_theta_o_is_the_constant_and_still_a_bound(problem, norm):
    blind = problem.sigma == 0
    norms = projected_norms(problem.values, problem.projection, norm=norm)
    bound = theta_o(*problem.inputs, norm=norm)
    assert bound.isfinite().all()
    expected = (problem.weights * norms).sum(-1)
    assert ((bound - expected).abs() <= tolerance(torch.float64, problem))[blind].all()
    assert (truth_of(problem, norm) <= bound + tolerance(torch.float64, problem))[blind].all()


def test_theta_o_may_exceed_theta():
    """Little kept, 1/σ = 10, and values on both sides of o: a bound, but not a better one."""
    three = torch.tensor([[[[0.1, 0.45, 0.45]]]]).double()
    apart, blocks = torch.tensor([[[[0.0], [1.0], [-1.0]]]]).double(), torch.ones(1, 1, 1).double()
    only = torch.tensor([[[True, False, False]]])
    assert float(theta_o(three, apart, blocks, only)) > 5 * float(theta(three, projected_norms(apart, blocks), only))


@given(problems(), NORMS)
def test_the_bounds_are_their_formulas(problem, norm):
    allowed = around_o_hat(torch.float64, problem)
    hat = naive_shifted(problem, norm, lambda weights, sigma, keep, written, left: left)
    assert ((theta_o_hat(*problem.inputs, norm=norm) - hat).abs() <= allowed).all()
    zero = naive_shifted(problem, norm, lambda weights, sigma, keep, written, left: 0 * left)
    got = shifted(*problem.inputs[:4], 0 * points(problem, 0), problem.sink_mass, norm=norm)
    assert ((got - zero).abs() <= allowed).all()


@given(problems(), NORMS, SEEDS, st.integers(1, 4))
def test_distances_in_blocks_equal_the_definition(problem, norm, seed, block):
    point = points(problem, seed)
    got = projected_distances(problem.values, problem.projection, point, norm=norm, block=block)
    written = torch.from_numpy(oracles.written(problem))
    expected = (written[:, :, None] - (point @ problem.projection)[..., None, :]).norm(p=norm, dim=-1)
    size = (problem.values.abs().amax() + point.abs().amax()) * problem.projection.abs().sum()
    assert ((got - expected).abs() <= 1e-12 * size).all()


@given(problems(), st.sampled_from([1, 2]), SEEDS)
def test_with_a_gate_the_centred_bounds_are_those_of_each_querys_own_projection(problem, norm, seed):
    gate = points(problem, seed)
    hat = theta_o_hat(*problem.inputs, norm=norm, gate=gate)
    moved = shifted(*problem.inputs[:4], points(problem, seed + 1), problem.sink_mass, norm=norm, gate=gate)
    for b, h, t in np.ndindex(*gate.shape[:3]):
        blocks = problem.projection.clone()
        blocks[h] = gate[b, h, t, :, None] * blocks[h]
        torch.testing.assert_close(
            hat[b, h, t], theta_o_hat(problem.weights, problem.values, blocks, *problem.inputs[3:], norm=norm)[b, h, t]
        )
        alone = shifted(
            problem.weights, problem.values, blocks, problem.keep, points(problem, seed + 1), problem.sink_mass, norm=norm
        )
        torch.testing.assert_close(moved[b, h, t], alone[b, h, t])


@given(problems(), st.sampled_from([1, 2]), st.integers(1, 3))
def test_padding_changes_no_bound(problem, norm, pads):
    padded = with_pads(problem, pads)
    allowed = 1e-12 * (1e4 * problem.projection.abs().sum() + 1)
    for bound in (theta_o, theta_o_hat):
        with_pads_there, without = bound(*padded.inputs, norm=norm), bound(*problem.inputs, norm=norm)
        assert ((with_pads_there - without).abs() <= allowed + 1e-9 * without).all()
    norms = [projected_norms(case.values, case.projection, norm=norm) for case in (padded, problem)]
    difference = theta(padded.weights, norms[0], padded.keep, padded.sink_mass) - theta(
        problem.weights, norms[1], problem.keep, problem.sink_mass
    )
    assert (difference.abs() <= allowed).all()


def test_a_component_that_all_values_share_loosens_theta_but_not_theta_o_hat():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1, 1, 8, 64, generator=generator).softmax(-1)
    values, blocks = torch.randn(1, 1, 64, 4, generator=generator), torch.randn(1, 4, 8, generator=generator)
    keep = torch.rand(1, 1, 64, generator=generator) < 0.5
    shared = values + 1000
    plain = theta_o_hat(weights, values, blocks, keep)
    torch.testing.assert_close(theta_o_hat(weights, shared, blocks, keep), plain, rtol=1e-3, atol=0)  # float32, and its digits
    assert (theta(weights, projected_norms(shared, blocks), keep) > 100 * plain).all()
