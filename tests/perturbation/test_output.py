"""The exact truth equals brute force, and the identities of the theory hold in it."""

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Problem, problems, tolerance, with_pads

from perturbation import (
    attention_output,
    coupling,
    evicted_output,
    evicted_weights,
    output_difference,
    perturbation,
    projected_difference,
)

NORMS = st.sampled_from([1, 2])
DTYPES = st.sampled_from([torch.float64, torch.float32])


def arguments(problem: Problem):
    return problem.weights, problem.values, problem.projection, problem.keep, problem.sink_mass


@given(problems(), NORMS, DTYPES)
def test_perturbation_equals_brute_force(problem, norm, dtype):
    problem = problem.to(dtype)  # rounded first: truth is that of the rounded numbers
    full, evicted = oracles.outputs(problem)
    expected = np.linalg.norm(full - evicted, ord=norm, axis=-1)
    got = perturbation(*arguments(problem), norm=norm)
    assert got.dtype == dtype
    assert (np.abs(got.double().numpy() - expected) <= tolerance(dtype, problem).numpy()).all()


@given(problems(), NORMS, st.sampled_from(["group", "layer"]))
def test_group_and_layer_sum_over_heads_before_the_norm(problem, norm, level):
    full, evicted = oracles.outputs(problem)
    units = problem.values.shape[1] if level == "group" else 1
    batch, heads, queries, model_dim = full.shape
    summed = (full - evicted).reshape(batch, units, heads // units, queries, model_dim).sum(2)
    got = perturbation(*arguments(problem), norm=norm, level=level)
    np.testing.assert_allclose(got, np.linalg.norm(summed, ord=norm, axis=-1), atol=1e-10)


@given(problems())
def test_outputs_before_and_after_equal_brute_force(problem):
    full, evicted = oracles.outputs(problem)
    before = attention_output(problem.weights, problem.values) @ problem.projection
    after = evicted_output(problem.weights, problem.values, problem.keep, problem.sink_mass) @ problem.projection
    np.testing.assert_allclose(before, full, atol=1e-10)
    np.testing.assert_allclose(after, evicted, atol=1e-10)


@given(problems(blind=False))
def test_removal_renormalises_over_survivors_and_sink(problem):
    left = evicted_weights(problem.weights, problem.keep, problem.sink_mass)
    assert (left[~problem.kept.expand_as(left)] == 0).all()
    torch.testing.assert_close(left.sum(-1), 1 - problem.sink_mass / problem.sigma)


@given(problems(blind=False))
def test_difference_is_the_evicted_mass_times_distance_from_o_and_from_o_hat(problem):
    """ô − o = (1/σ) Σ_E A_i (o − ν_i) = Σ_E A_i (ô − ν_i); the second also where σ is 0."""
    full, evicted = (torch.from_numpy(array) for array in oracles.outputs(problem))
    written = problem.values.repeat_interleave(problem.group, 1) @ problem.projection
    gone = problem.weights * ~problem.kept
    from_full = (gone[..., None] * (full[..., None, :] - written[:, :, None])).sum(-2)  # σ times what it should be
    from_evicted = (gone[..., None] * (evicted[..., None, :] - written[:, :, None])).sum(-2)
    got = -output_difference(problem.weights, problem.values, problem.keep, problem.sink_mass) @ problem.projection
    allowed = tolerance(torch.float64, problem)[..., None]
    assert ((problem.sigma[..., None] * got - from_full).abs() <= allowed).all()
    assert ((got - from_evicted).abs() <= allowed).all()


@given(problems(), NORMS)
def test_perturbation_is_lost_mass_times_mismatch(problem, norm):
    """‖o − ô‖ = (1 − σ) ‖ô − m_E‖, m_E the attention-weighted mean of the evicted values."""
    _, evicted = (torch.from_numpy(array) for array in oracles.outputs(problem))
    written = problem.values.repeat_interleave(problem.group, 1) @ problem.projection
    gone = problem.weights * ~problem.kept
    lost = gone.sum(-1)
    mean = torch.where(lost[..., None] > 0, gone @ written / lost.clamp(min=1e-300)[..., None], 0)
    expected = lost * (evicted - mean).norm(p=norm, dim=-1)
    got = perturbation(*arguments(problem), norm=norm)
    assert ((got - expected).abs() <= tolerance(torch.float64, problem)).all()


@given(problems(), NORMS)
def test_keeping_everything_changes_nothing_at_all(problem, norm):
    everything = torch.ones_like(problem.keep)
    got = perturbation(problem.weights, problem.values, problem.projection, everything, problem.sink_mass, norm=norm)
    assert (got == 0).all()


@given(problems(), NORMS)
def test_heads_can_cancel_but_never_add_up_to_more(problem, norm):
    per_head = perturbation(*arguments(problem), norm=norm)
    layer = perturbation(*arguments(problem), norm=norm, level="layer")[:, 0]
    assert (layer <= per_head.sum(1) * (1 + 1e-12) + 1e-300).all()
    difference = output_difference(problem.weights, problem.values, problem.keep, problem.sink_mass)
    ratio = coupling(projected_difference(difference, problem.projection, problem.values.shape[1]), norm=norm)
    moved = per_head.sum(1) > 0
    assert (ratio[~moved] == 1).all()
    torch.testing.assert_close(ratio[moved] * per_head.sum(1)[moved], layer[moved])


@given(problems())
def test_a_batch_gives_the_numbers_of_its_rows(problem):
    whole = perturbation(*arguments(problem))
    for row in range(problem.weights.shape[0]):
        part = slice(row, row + 1)
        alone = perturbation(
            problem.weights[part],
            problem.values[part],
            problem.projection,
            problem.keep[part],
            problem.sink_mass[part],
        )
        torch.testing.assert_close(whole[part], alone, rtol=1e-13, atol=1e-15)


@given(problems(), st.integers(0, 2**32 - 1))
def test_many_masks_in_one_call_are_each_mask_alone(problem, seed):
    other = torch.rand(problem.keep.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    masks = torch.stack([problem.keep, problem.keep | other])
    together = perturbation(problem.weights[None], problem.values[None], problem.projection, masks, problem.sink_mass[None])
    for mask, got in zip(masks, together, strict=True):
        alone = perturbation(problem.weights, problem.values, problem.projection, mask, problem.sink_mass)
        torch.testing.assert_close(got, alone, rtol=1e-13, atol=1e-15)


def test_a_tiny_removal_keeps_its_digits_in_float32():
    """Evicting a mass of 1e-7 from large, nearly equal values: o − ô is 1e-9 of o, and still right to float32."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(1, 1, 4, 64, generator=generator).double()
    weights[..., -1] = 1e-7
    weights = (weights / weights.sum(-1, keepdim=True)).float()
    values = 100 + torch.randn(1, 1, 64, 8, generator=generator)
    projection = torch.randn(1, 8, 16, generator=generator)
    keep = torch.ones(1, 1, 64, dtype=torch.bool)
    keep[..., -1] = False
    exact = weights.double() / weights.double().sum(-1, keepdim=True)
    problem = Problem(exact, torch.zeros(1, 1, 4).double(), values.double(), projection.double(), keep)
    full, evicted = oracles.outputs(problem)
    expected = torch.from_numpy(np.abs(full - evicted).sum(-1))
    got = perturbation(weights, values, projection, keep)
    torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=0)
    naive = (attention_output(weights, values) - evicted_output(weights, values, keep)) @ projection
    assert ((naive.abs().sum(-1) - expected).abs() > (got - expected).abs()).all()


@given(problems(blind=True), NORMS)
def test_a_query_to_which_nothing_is_left_reads_nothing(problem, norm):
    """σ = 0: ô = 0 and L = ‖o‖, as scaled dot-product attention has it."""
    blind = problem.sigma == 0
    full, _ = oracles.outputs(problem)
    after = evicted_output(problem.weights, problem.values, problem.keep, problem.sink_mass)
    assert (after[blind] == 0).all()
    expected = torch.from_numpy(np.linalg.norm(full, ord=norm, axis=-1))
    got = perturbation(*arguments(problem), norm=norm)
    assert ((got - expected).abs() <= tolerance(torch.float64, problem))[blind].all()


def test_a_query_to_which_nothing_is_left_reads_what_sdpa_gives_it():
    nothing = torch.zeros(1, 1, 1, 3, dtype=torch.bool)
    read = torch.nn.functional.scaled_dot_product_attention(
        torch.ones(1, 1, 1, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), attn_mask=nothing
    )
    weights, keep = torch.eye(3)[None, None, :1], torch.tensor([[[False, True, True]]])
    assert (evicted_output(weights, torch.ones(1, 1, 3, 4), keep) == read).all()


@given(problems(), st.sampled_from([torch.float16, torch.bfloat16]))
def test_low_precision_is_upcast_before_anything_is_computed(problem, dtype):
    """To the precision of float32, what the same numbers give in float64, term by term: low precision itself would be off by 1e-3."""
    low = problem.to(dtype)
    got = perturbation(*arguments(low))
    assert got.dtype == torch.float32
    exact = low.to(torch.float64)
    lost = (exact.weights * ~exact.kept).sum(-1, keepdim=True)
    changes = torch.where(exact.kept, -exact.left * lost, exact.weights)
    written = exact.values.repeat_interleave(exact.group, 1) @ exact.projection
    expected = (changes @ written).norm(p=1, dim=-1)
    assert ((got - expected).abs() <= tolerance(torch.float32, exact) + 1e-30).all()


def test_mixed_precision_is_computed_in_the_better_one():
    """Float32 weights and values of pi in float64: computed in float32, L would be off by 1e-6."""
    weights = torch.randn(1, 2, 4, 32).softmax(-1)
    values, blocks = torch.full((1, 1, 32, 3), torch.pi).double(), torch.randn(2, 3, 5).double()
    values[..., ::2, :] *= -1
    keep = (torch.arange(32) < 16)[None, None]
    got = perturbation(weights, values, blocks, keep)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, perturbation(weights.double(), values, blocks, keep), rtol=1e-12, atol=0)
    assert attention_output(weights, values * 1e300).isfinite().all()


def test_under_autocast_it_is_refused_rather_than_computed_in_low_precision():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast is on"):
        perturbation(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), torch.ones(1, 1, 1).bool())


def test_what_overflows_is_refused():
    weights, keep = torch.tensor([[[[0.5, 0.5]]]]), torch.tensor([[[True, False]]])
    values, blocks = torch.tensor([[[[1e30], [-1e30]]]]), torch.ones(1, 1, 3)
    assert perturbation(weights, values, blocks, keep).isfinite().all()
    with pytest.raises(ValueError, match=r"the perturbation overflows torch\.float32"):
        perturbation(weights, values, blocks, keep, norm=2)


@given(problems(), NORMS, st.sampled_from(["head", "group", "layer"]))
def test_nothing_infinite_and_no_nan_comes_out(problem, norm, level):
    assert perturbation(*arguments(problem), norm=norm, level=level).isfinite().all()
    assert evicted_weights(problem.weights, problem.keep, problem.sink_mass).isfinite().all()
    difference = output_difference(problem.weights, problem.values, problem.keep, problem.sink_mass)
    assert coupling(projected_difference(difference, problem.projection, problem.values.shape[1])).isfinite().all()


@given(problems(), NORMS, st.integers(1, 3))
def test_padding_changes_nothing(problem, norm, pads):
    """Entries of weight 0, whatever their values and whether kept or not."""
    padded = with_pads(problem, pads)
    got = perturbation(*arguments(padded), norm=norm)
    assert ((got - perturbation(*arguments(problem), norm=norm)).abs() <= tolerance(torch.float64, problem)).all()


def test_a_norm_below_1_is_refused():
    with pytest.raises(ValueError, match=r"not 0\.5"):
        perturbation(
            torch.ones(1, 1, 1, 1),
            torch.ones(1, 1, 1, 1),
            torch.ones(1, 1, 1),
            torch.ones(1, 1, 1, dtype=torch.bool),
            norm=0.5,
        )
