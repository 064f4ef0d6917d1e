"""A whole budget curve from one sort equals one removal at a time."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems, tolerance

from bounds import retained_mass
from perturbation import budget_curve, perturbation, ranking
from perturbation import coupling as coupling_of
from perturbation.output import output_difference, projected_difference

SEEDS = st.integers(0, 2**32 - 1)


def scores_of(problem, seed):
    """Scores with ties."""
    return torch.randint(0, 4, problem.keep.shape, generator=torch.Generator().manual_seed(seed))


def first(order, budget):
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., :budget], True)


@given(problems(), SEEDS, st.sampled_from([1, 2]), st.sampled_from(["head", "group", "layer"]), st.data())
def test_every_budget_of_a_ranking_equals_its_mask_alone(problem, seed, norm, level, data):
    order = ranking(scores_of(problem, seed))
    keys = order.shape[-1]
    budgets = data.draw(st.lists(st.integers(1, keys), min_size=1, max_size=5))
    curve = budget_curve(problem.weights, problem.values, order, budgets, problem.sink_mass)
    got = curve.perturbation(problem.projection, norm=norm, level=level)
    ratio = curve.coupling(problem.projection, norm=norm)
    for index, budget in enumerate(budgets):
        keep = first(order, budget)
        alone = perturbation(
            problem.weights, problem.values, problem.projection, keep, problem.sink_mass, norm=norm, level=level
        )
        allowed = tolerance(torch.float64, replace(problem, keep=keep))
        heads = allowed if level == "head" else allowed.sum(1, keepdim=True)
        assert ((got[index] - alone).abs() <= heads).all()
        torch.testing.assert_close(curve.retained_mass[index], retained_mass(problem.weights, keep, problem.sink_mass))
        difference = output_difference(problem.weights, problem.values, keep, problem.sink_mass)
        projected = projected_difference(difference, problem.projection, problem.values.shape[1])
        expected = coupling_of(projected, norm=norm)
        clear = projected.norm(p=norm, dim=-1).sum(1) > 1e6 * allowed.sum(1)
        torch.testing.assert_close(ratio[index][clear], expected[clear], rtol=1e-4, atol=1e-4)


@given(problems(sinks=True), SEEDS)
def test_with_a_sink_a_budget_of_nothing_leaves_the_sink(problem, seed):
    keep = torch.zeros_like(problem.keep)
    if not (problem.sink_mass > 0).all():
        return
    curve = budget_curve(problem.weights, problem.values, ranking(scores_of(problem, seed)), [0], problem.sink_mass)
    expected = perturbation(problem.weights, problem.values, problem.projection, keep, problem.sink_mass)
    torch.testing.assert_close(curve.perturbation(problem.projection)[0], expected)
    torch.testing.assert_close(curve.retained_mass[0], problem.sink_mass)


@given(problems(), SEEDS)
def test_the_full_budget_changes_nothing_at_all(problem, seed):
    order = ranking(scores_of(problem, seed))
    curve = budget_curve(problem.weights, problem.values, order, [order.shape[-1]], problem.sink_mass)
    assert (curve.perturbation(problem.projection) == 0).all()


@given(problems(), SEEDS, SEEDS)
def test_several_rankings_in_one_call_are_each_ranking_alone(problem, one, other):
    orders = torch.stack([ranking(scores_of(problem, one)), ranking(scores_of(problem, other))])
    budgets = list(range(1, orders.shape[-1] + 1))
    together = budget_curve(problem.weights[None], problem.values[None], orders, budgets, problem.sink_mass[None])
    for number, order in enumerate(orders):
        alone = budget_curve(problem.weights, problem.values, order, budgets, problem.sink_mass)
        torch.testing.assert_close(together.difference[:, number], alone.difference, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(together.retained_mass[:, number], alone.retained_mass, rtol=1e-12, atol=1e-14)


@given(problems(), SEEDS, SEEDS)
def test_equal_scores_rank_by_position_and_protected_entries_come_first(problem, seed, window):
    scores = scores_of(problem, seed)
    protected = torch.rand(problem.keep.shape, generator=torch.Generator().manual_seed(window)) < 0.3
    order = ranking(scores, protected)
    for row_order, row_scores, row_first in zip(
        order.flatten(0, 1).tolist(), scores.flatten(0, 1).tolist(), protected.flatten(0, 1).tolist(), strict=True
    ):
        assert row_order == sorted(range(len(row_order)), key=lambda i: (not row_first[i], -row_scores[i], i))


def test_a_small_rest_keeps_its_digits_in_float32():
    """The last entry holds 1e-7 of the attention: as a difference of prefix sums it would be noise."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(1, 1, 4, 64, generator=generator)
    weights[..., -1] = 1e-7
    weights = weights / weights.sum(-1, keepdim=True)
    values, blocks = 100 + torch.randn(1, 1, 64, 8, generator=generator), torch.randn(1, 8, 16, generator=generator)
    order = torch.arange(64)[None, None]
    got = budget_curve(weights, values, order, [63]).perturbation(blocks)[0]
    exact = budget_curve(weights.double(), values.double(), order, [63]).perturbation(blocks.double())[0]
    torch.testing.assert_close(got.double(), exact, rtol=2e-2, atol=0)
