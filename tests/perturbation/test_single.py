"""The error of removing one entry alone equals removing it."""

import oracles
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import Problem, problems, tolerance

from perturbation import factors, perturbation, single_eviction_error

NORMS = st.sampled_from([1, 2])


def one_hot(keys: int) -> Problem:
    """All attention on the first entry."""
    weights = torch.zeros(1, 1, 1, keys).double()
    weights[..., 0] = 1
    values = torch.arange(1, 2 * keys + 1).double().reshape(1, 1, keys, 2)
    return Problem(weights, torch.zeros(1, 1, 1).double(), values, torch.eye(2).double()[None], torch.ones(1, 1, keys).bool())


@given(problems(), NORMS, st.sampled_from(["head", "group", "layer"]), st.sampled_from([torch.float64, torch.float32]))
@example(one_hot(1), 1, "group", torch.float64)
@example(one_hot(3), 1, "group", torch.float32)
def test_the_error_of_every_entry_is_that_of_the_mask_without_it(problem, norm, level, dtype):
    """‖Σ_h A_{h,i} / (1 − A_{h,i}) (ν_{h,i} − o_h)‖, A_i = 1 included."""
    cast = problem.to(dtype)
    got = single_eviction_error(cast.weights, cast.values, cast.projection, cast.sink_mass, norm=norm, level=level)
    assert got.isfinite().all()
    exact = cast.to(torch.float64)
    keys = problem.keep.shape[-1]
    for entry in range(keys):
        keep = torch.ones_like(problem.keep)
        keep[..., entry] = False
        alone = Problem(exact.weights, exact.sink_mass, exact.values, exact.projection, keep)
        full, evicted = map(torch.from_numpy, oracles.outputs(alone))
        change = full - evicted
        allowed = tolerance(dtype, alone)
        if level != "head":
            units = problem.values.shape[1] if level == "group" else 1
            change, allowed = (part.unflatten(1, (units, -1)).sum(2) for part in (change, allowed))
        assert ((got[..., entry] - change.norm(p=norm, dim=-1)).abs() <= allowed).all()


def test_all_attention_on_the_entry_that_goes_leaves_its_own_size():
    problem = one_hot(3)
    got = single_eviction_error(problem.weights, problem.values, problem.projection)
    assert got.flatten().tolist() == [3, 0, 0]  # ‖(1, 2)‖₁, and nothing for entries that nobody looked at


def test_a_dominating_entry_keeps_its_digits_in_float32():
    """A = 1 − 1e-6: A / (1 − A) is off by 6 % in float32, the error must not be."""
    rest = torch.tensor([3e-7, 7e-7])
    weights = torch.cat([1 - rest.sum()[None], rest])[None, None, None]
    values = torch.tensor([[[[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]]]])
    blocks = torch.tensor([[[1.0, 0.5], [-0.25, 2.0]]])
    got = single_eviction_error(weights, values, blocks)[..., 0]
    keep = torch.tensor([[[False, True, True]]])
    exact = weights.double() / weights.double().sum()
    torch.testing.assert_close(got.double(), perturbation(exact, values.double(), blocks.double(), keep), rtol=1e-5, atol=0)


@given(problems(), NORMS, st.integers(0, 2**32 - 1))
def test_a_gate_scales_each_querys_error_before_w_o(problem, norm, seed):
    gate = torch.randn(
        *problem.weights.shape[:3], problem.values.shape[3], generator=torch.Generator().manual_seed(seed)
    ).double()
    got = single_eviction_error(problem.weights, problem.values, problem.projection, problem.sink_mass, norm=norm, gate=gate)
    for entry in range(problem.keep.shape[-1]):
        keep = torch.ones_like(problem.keep)
        keep[..., entry] = False
        if keep.shape[-1] == 1 and not (problem.sink_mass > 0).all():
            return
        inputs = (problem.weights, problem.values, problem.projection, keep, problem.sink_mass)
        alone = perturbation(*inputs, norm=norm, gate=gate, level="group")
        torch.testing.assert_close(got[..., entry], alone, rtol=1e-8, atol=1e-8 * float(problem.scale.max() + 1))


@given(problems(), NORMS, st.sampled_from([torch.float64, torch.float32]))
def test_the_error_is_the_lost_mass_times_the_mismatch(problem, norm, dtype):
    """‖o − ô‖ = (1 − σ) ‖ô − m_E‖, and both factors are what they say."""
    problem = problem.to(dtype)
    found = factors(*problem.inputs, norm=norm)
    exact = problem.to(torch.float64)
    got = found.lost_mass.double() * found.mismatch.double()
    truth = perturbation(*exact.inputs, norm=norm)
    assert ((got - truth).abs() <= 2 * tolerance(dtype, problem)).all()
    lost = (exact.weights * ~exact.kept).sum(-1)
    torch.testing.assert_close(found.lost_mass.double(), lost, rtol=1e-5, atol=0)
    assert (found.mismatch[lost == 0] == 0).all()
    assert found.mismatch.isfinite().all()


@given(problems(sinks=False, blind=False), NORMS)
def test_without_a_sink_the_mismatch_is_between_the_means_of_kept_and_evicted(problem, norm):
    def apart(weights, sink, keep, written):
        if weights[~keep].sum() == 0:
            return 0.0
        kept = weights[keep] @ written[keep] / weights[keep].sum()
        gone = weights[~keep] @ written[~keep] / weights[~keep].sum()
        return torch.from_numpy(kept - gone).norm(p=norm).item()

    expected = torch.from_numpy(oracles.per_query(problem, apart))
    found = factors(*problem.inputs, norm=norm).mismatch
    size = (problem.values.abs().amax() + 1) * problem.projection.abs().sum()
    assert ((found - expected).abs() <= 1e-12 * size).all()
