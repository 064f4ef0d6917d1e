"""Optima are optima: against every choice, written out by hand."""

from itertools import combinations

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Problem, problems

from bounds import (
    branch_and_bound,
    dinkelbach,
    exhaustive,
    gap,
    local_search,
    minimal_theta,
    minimal_theta_o_hat,
    projected_norms,
    shifted,
    theta,
    theta_o,
    theta_o_hat,
)
from bounds.optimum.choice import least as least_of
from perturbation import perturbation

SEEDS = st.integers(0, 2**32 - 1)
NORMS = st.sampled_from([1, 2])


def every_choice(keys, budget, must=(), may=None):
    free = [i for i in range(keys) if i not in must and (may is None or i in may)]
    for rest in combinations(free, budget - len(must)):
        yield sorted({*must, *rest})


def mask(keys, chosen):
    keep = torch.zeros(keys, dtype=torch.bool)
    keep[list(chosen)] = True
    return keep


def limits_of(data, keys):
    """A budget, what must be kept, and what may be."""
    roles = data.draw(st.lists(st.sampled_from(["free", "free", "free", "must", "barred"]), min_size=keys, max_size=keys))
    must = [i for i, role in enumerate(roles) if role == "must"]
    may = [i for i, role in enumerate(roles) if role != "barred"] or [0]
    budget = data.draw(st.integers(max(len(must), 1), len(may)))
    return budget, must, may


def naive_theta(weights, sink, norms, keep):
    sigma = sink + weights[keep].sum()
    held = (weights * norms)[keep].sum() / sigma if sigma > 0 else 0
    return (weights * norms)[~keep].sum() + weights[~keep].sum() * held


@given(problems(), NORMS, st.data())
def test_the_exhaustive_minimum_of_theta_is_the_least_over_all_choices(problem, norm, data):
    keys, group = problem.keep.shape[-1], problem.group
    budget, must, may = limits_of(data, keys)
    norms = projected_norms(problem.values, problem.projection, norm=norm)
    found = minimal_theta(
        problem.weights,
        norms,
        problem.keep.shape[1],
        budget,
        problem.sink_mass,
        protected=mask(keys, must)[None, None],
        candidates=mask(keys, may)[None, None],
    )
    assert found.proved.all()
    for b, k in np.ndindex(*problem.keep.shape[:2]):
        rows = [(h, t) for h in range(k * group, (k + 1) * group) for t in range(problem.weights.shape[2])]

        def value(keep, b=b, rows=rows):
            each = [
                naive_theta(
                    problem.weights[b, h, t].numpy(),
                    float(problem.sink_mass[b, h, t]),
                    norms[b, h, 0].numpy(),
                    np.asarray(keep),
                )
                for h, t in rows
            ]
            return sum(each) / len(each)

        least = min(value(mask(keys, chosen)) for chosen in every_choice(keys, budget, must, may))
        assert float(found.value[b, k]) == pytest.approx(least, rel=1e-9, abs=1e-12)
        assert value(found.keep[b, k]) == pytest.approx(least, rel=1e-9, abs=1e-12)
        assert int(found.keep[b, k].sum()) == budget
        assert all(bool(found.keep[b, k, i]) for i in must)


@given(problems(blind=False), NORMS, st.data())
def test_the_exhaustive_minimum_of_theta_o_hat_is_at_most_that_of_theta_and_at_least_the_least_truth(problem, norm, data):
    """L ≤ θ_ô ≤ θ for every choice, so the same holds for the three minima; and θ_ô at its minimiser is its minimum."""
    keys = min(problem.keep.shape[-1], 6)
    part = slice(0, keys)
    total = problem.weights[..., part].sum(-1) + problem.sink_mass
    if not (total > 1e-3).all():
        return
    small = Problem(
        problem.weights[..., part] / total[..., None],
        problem.sink_mass / total,
        problem.values[:, :, part],
        problem.projection,
        problem.keep[..., part],
    )
    budget = data.draw(st.integers(1, keys))
    norms = projected_norms(small.values, small.projection, norm=norm)
    kv_heads = small.keep.shape[1]
    in_theta = minimal_theta(small.weights, norms, kv_heads, budget, small.sink_mass)
    inner = minimal_theta_o_hat(small.weights, small.values, small.projection, budget, small.sink_mass, norm=norm)
    own = theta_o_hat(small.weights, small.values, small.projection, inner.keep, small.sink_mass, norm=norm)
    torch.testing.assert_close(own.unflatten(1, (kv_heads, -1)).mean((-2, -1)), inner.value, rtol=1e-9, atol=1e-9)
    slack = 1e-9 * (1 + norms.max())
    assert (inner.value <= in_theta.value + slack).all()
    found = gap(small.weights, small.values, small.projection, inner.keep, small.sink_mass, norm=norm)
    assert (found.perturbation_optimum <= inner.value + slack).all()
    assert found.perturbation_proved.all()


@given(problems(), NORMS, st.data())
def test_the_gap_names_the_least_truth_of_all_choices(problem, norm, data):
    keys, group = problem.keep.shape[-1], problem.group
    budget = data.draw(st.integers(1, keys))
    chosen = torch.rand(problem.keep.shape, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :budget]
    keep = torch.zeros_like(problem.keep).scatter(-1, chosen, True)
    found = gap(problem.weights, problem.values, problem.projection, keep, problem.sink_mass, norm=norm)
    least = torch.full(keep.shape[:2], torch.inf).double()
    for choice in every_choice(keys, budget):
        other = mask(keys, choice).expand_as(keep)
        full, evicted = oracles.outputs(Problem(problem.weights, problem.sink_mass, problem.values, problem.projection, other))
        size = torch.from_numpy(np.linalg.norm(full - evicted, ord=norm, axis=-1))
        least = torch.minimum(least, size.unflatten(1, (-1, group)).mean((-2, -1)))
    allowed = 1e-9 * (1 + float(problem.scale.max()))
    assert ((found.perturbation_optimum - least).abs() <= allowed).all()
    assert (found.perturbation >= found.perturbation_optimum - allowed).all()
    assert (found.in_theta >= 1).all()
    assert (found.in_truth >= 1).all()
    assert found.in_truth.isfinite().all()


@given(problems(), st.data(), SEEDS)
def test_dinkelbach_finds_the_least_ratio_of_all_choices(problem, data, seed):
    """min (Σ_E A d) / σ, for any d ≥ 0 (ties and zeros among them), with entries that must and that may not be kept."""
    weights, sink = problem.weights[:, :, 0], problem.sink_mass[:, :, 0]
    keys = weights.shape[-1]
    budget, must, may = limits_of(data, keys)
    distances = torch.randint(0, 5, weights.shape, generator=torch.Generator().manual_seed(seed)).double() / 2
    found = dinkelbach(weights, distances, budget, sink, protected=mask(keys, must), candidates=mask(keys, may))
    assert (found.keep.sum(-1) == budget).all()
    assert found.keep[..., must].all()
    assert not found.keep[..., [i for i in range(keys) if i not in may]].any()
    for row in np.ndindex(*weights.shape[:2]):

        def ratio(keep, row=row):
            sigma = float(sink[row] + weights[row][keep].sum())
            lost = float((weights[row] * distances[row])[~keep].sum())
            return lost / sigma if sigma > 0 else np.inf

        least = min(ratio(mask(keys, chosen)) for chosen in every_choice(keys, budget, must, may))
        if np.isfinite(least):
            assert float(found.value[row]) == pytest.approx(least, rel=1e-9, abs=1e-12)
            assert ratio(found.keep[row]) == pytest.approx(least, rel=1e-9, abs=1e-12)
        else:
            assert found.value[row].isfinite()


@given(problems(blind=False), NORMS, st.data())
def test_dinkelbach_minimises_theta_o(problem, norm, data):
    weights, sink = problem.weights[:1, :1, :1], problem.sink_mass[:1, :1, :1]
    values, blocks = problem.values[:1, :1], problem.projection[:1]
    keys = weights.shape[-1]
    budget = data.draw(st.integers(1, keys))
    written = torch.from_numpy(oracles.written(problem))[0, 0]
    whole = weights[0, 0, 0] @ written
    distances = (written - whole).norm(p=norm, dim=-1)
    found = dinkelbach(weights[0, 0], distances[None], budget, sink[0, 0])
    bounds = []
    for chosen in every_choice(keys, budget):
        keep = mask(keys, chosen)
        if float(sink + weights[0, 0, 0][keep].sum()) > 1e-9:
            bounds.append(float(theta_o(weights, values, blocks, keep[None, None], sink, norm=norm)))
    if bounds:
        assert float(found.value) <= min(bounds) * (1 + 1e-9) + 1e-9


@given(problems(), st.data(), SEEDS)
def test_branch_and_bound_finds_the_least_theta_of_all_choices(problem, data, seed):
    weights, sink = problem.weights[:, :, 0], problem.sink_mass[:, :, 0]
    keys = weights.shape[-1]
    budget, must, may = limits_of(data, keys)
    norms = torch.randint(0, 7, weights.shape, generator=torch.Generator().manual_seed(seed)).double() / 2
    found = branch_and_bound(weights, norms, budget, sink, protected=mask(keys, must), candidates=mask(keys, may))
    whole = (weights * norms).sum(-1)
    assert (found.proved | (found.value < 1e-4 * whole)).all()  # below, θ is too near the rounding of C
    assert (found.keep.sum(-1) == budget).all()
    for row in np.ndindex(*weights.shape[:2]):
        arguments = weights[row].numpy(), float(sink[row]), norms[row].numpy()
        least = min(naive_theta(*arguments, mask(keys, c).numpy()) for c in every_choice(keys, budget, must, may))
        assert float(found.value[row]) == pytest.approx(least, rel=1e-9, abs=1e-12)
        assert naive_theta(*arguments, found.keep[row].numpy()) == pytest.approx(least, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_branch_and_bound_carries_to_a_thousand_entries_and_its_lower_bound_holds(share):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(4, 1000, generator=generator).mul(2).double().softmax(-1)
    norms = torch.rand(4, 1000, generator=generator).double() + 0.5
    budget = int(share * 1000)
    found = branch_and_bound(weights, norms, budget, nodes=2000)
    greedy = (weights * norms).argsort(-1, descending=True)[:, :budget]
    keep = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, greedy, True)
    top = theta(weights[:, None, None], norms[:, None, None], keep[:, None])[:, 0, 0]
    assert (found.lower <= found.value).all()
    assert (found.value <= top + 1e-12).all()
    assert ((found.value - found.lower) <= 1e-3 * found.value).all()
    assert found.proved.any()


def test_branch_and_bound_stopped_early_says_so_and_still_bounds():
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(40, 60, generator=generator).mul(2).double().softmax(-1)
    norms = torch.rand(40, 60, generator=generator).double() ** 3 + 0.01
    early = branch_and_bound(weights, norms, 6, nodes=0)
    whole = branch_and_bound(weights, norms, 6)
    assert whole.proved.all()
    assert not early.proved.all()
    assert (early.lower <= whole.value + 1e-12).all()
    assert (early.value >= whole.value - 1e-12).all()


@given(problems(), st.data())
def test_local_search_ends_where_no_exchange_helps_and_never_above_its_start(problem, data):
    keys, kv_heads = problem.keep.shape[-1], problem.keep.shape[1]
    start = problem.keep
    found = local_search(problem.weights, problem.values, problem.projection, start, problem.sink_mass)
    assert (found.keep.sum(-1) == start.sum(-1)).all()

    def error(keep):
        each = perturbation(problem.weights, problem.values, problem.projection, keep, problem.sink_mass, norm=2)
        return each.unflatten(1, (kv_heads, -1)).mean((-2, -1))

    allowed = 1e-7 * (1e-6 + float(problem.scale.max()))
    reached = error(found.keep)
    assert ((reached - found.value).abs() <= allowed).all()
    assert (reached <= error(start) + allowed).all()
    b, k = data.draw(st.sampled_from(list(np.ndindex(*start.shape[:2]))))
    kept, gone = found.keep[b, k].nonzero().flatten().tolist(), (~found.keep[b, k]).nonzero().flatten().tolist()
    for out in kept:
        for into in gone:
            other = found.keep.clone()
            other[b, k, out], other[b, k, into] = False, True
            mass = problem.sink_mass[b] + (problem.weights[b] * other[b].repeat_interleave(problem.group, 0)[:, None]).sum(-1)
            held = problem.sink_mass[b] + (problem.weights[b] * found.keep[b].repeat_interleave(problem.group, 0)[:, None]).sum(
                -1
            )
            if min(mass.min(), held.min()) > 1e-6:  # below, the Gram form has few digits
                assert float(error(other)[b, k]) >= float(reached[b, k]) - allowed
    assert keys == len(kept) + len(gone)


def test_local_search_improves_on_attention_only_and_respects_what_is_protected():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1, 2, 1, 128, generator=generator).mul(2).double().softmax(-1)
    values = torch.randn(1, 2, 128, 8, generator=generator).double() + 3
    blocks = torch.randn(2, 8, 16, generator=generator).double()
    keep = torch.zeros(1, 2, 128, dtype=torch.bool).scatter(-1, weights[:, :, 0].topk(26).indices, True)
    protected = keep & (torch.arange(128) > 100)
    barred = ~keep & (torch.arange(128) < 20)
    found = local_search(weights, values, blocks, keep, protected=protected, candidates=~barred)
    before = perturbation(weights, values, blocks, keep, norm=2)
    after = perturbation(weights, values, blocks, found.keep, norm=2)
    assert (after < 0.9 * before).all()
    assert found.keep[protected].all()
    assert not found.keep[barred].any()
    assert not found.proved.any()
    with pytest.raises(ValueError, match="every protected entry"):
        local_search(weights, values, blocks, keep, protected=~keep)


def test_beyond_what_can_be_tried_the_gap_comes_from_search_and_says_so():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1, 1, 1, 200, generator=generator).mul(2).double().softmax(-1)
    values, blocks = (
        torch.randn(1, 1, 200, 8, generator=generator).double() + 1,
        torch.randn(1, 8, 16, generator=generator).double(),
    )
    keep = torch.zeros(1, 1, 200, dtype=torch.bool).scatter(-1, weights[:, :, 0].topk(40).indices, True)
    found = gap(weights, values, blocks, keep)
    assert found.theta_proved.all()
    assert not found.perturbation_proved.any()
    assert float(found.in_truth) > 1.2
    assert 1 <= float(found.in_theta) < 1.5
    with pytest.raises(ValueError, match="cannot all be tried"):
        gap(weights.expand(1, 1, 2, 200), values, blocks, keep)


def test_of_equal_choices_the_earlier_entries_win():
    weights, norms = torch.full((1, 1, 1, 5), 0.2).double(), torch.ones(1, 1, 1, 5).double()
    expected = [True, True, False, False, False]
    assert minimal_theta(weights, norms, 1, 2).keep[0, 0].tolist() == expected
    assert dinkelbach(weights[0, 0], norms[0, 0], 2).keep[0].tolist() == expected


def test_what_cannot_be_chosen_is_refused_with_the_numbers():
    weights, norms = torch.full((1, 1, 1, 40), 1 / 40).double(), torch.ones(1, 1, 1, 40).double()
    with pytest.raises(ValueError, match="137,846,528,820 choices"):
        minimal_theta(weights, norms, 1, 20)
    with pytest.raises(ValueError, match="budget of 41 entries"):
        dinkelbach(weights[0, 0], norms[0, 0], 41)
    with pytest.raises(ValueError, match="budget of 2 entries is out of range: 3 are protected"):
        dinkelbach(weights[0, 0], norms[0, 0], 2, protected=mask(40, [0, 1, 2]))
    with pytest.raises(ValueError, match="1 entries are protected but no candidates"):
        dinkelbach(weights[0, 0], norms[0, 0], 2, protected=mask(40, [0]), candidates=mask(40, range(1, 40)))
    with pytest.raises(ValueError, match="not negative"):
        dinkelbach(weights[0, 0], -norms[0, 0], 2)
    with pytest.raises(ValueError, match="same number of entries"):
        gap(
            weights.expand(1, 2, 1, 40),
            torch.ones(1, 2, 40, 1).double(),
            torch.ones(2, 1, 1).double(),
            torch.stack([mask(40, [0]), mask(40, [0, 1])])[None],
        )


def test_branch_and_bound_proves_nothing_where_theta_is_lost_in_rounding():
    """All but 1e-14 of the attention is kept whatever is chosen: θ is smaller than the rounding of C."""
    tails = torch.rand(8, generator=torch.Generator().manual_seed(0)).double() * 1e-14
    weights = torch.cat([torch.full((6,), (1 - float(tails.sum())) / 6).double(), tails])[None]
    assert not branch_and_bound(weights, torch.ones(1, 14).double(), 10).proved.any()


def test_branch_and_bound_takes_weights_that_low_precision_left_off_1():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(20, 10, generator=generator).softmax(-1).bfloat16().double()
    weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()  # off by up to 4e-3
    norms = torch.rand(20, 10, generator=generator)
    found = branch_and_bound(weights, norms, 4)
    for row in range(20):
        arguments = weights[row].double().numpy(), 0.0, norms[row].double().numpy()
        least = min(naive_theta(*arguments, mask(10, chosen).numpy()) for chosen in every_choice(10, 4))
        assert float(found.value[row]) == pytest.approx(least, rel=1e-9)
        assert float(found.lower[row]) <= least * (1 + 1e-9)


def test_a_gap_to_choices_that_break_what_is_protected_is_refused():
    weights, values, blocks = (
        torch.full((1, 1, 1, 4), 0.25).double(),
        torch.ones(1, 1, 4, 1).double(),
        torch.ones(1, 1, 1).double(),
    )
    with pytest.raises(ValueError, match=r"1 entries break that \(protected\)"):
        gap(weights, values, blocks, mask(4, [0])[None, None], protected=mask(4, [1])[None, None])


def test_an_objective_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite for 6 of 6 choices"):
        exhaustive(lambda row, masks: torch.full((len(masks),), torch.nan), (1, 1, 4), 2)


def test_exhaustive_minimises_any_objective():
    wanted = mask(6, [1, 4])
    found = exhaustive(lambda row, masks: (masks != wanted).sum(-1).double() + row[1], (1, 2, 6), 2)
    assert (found.keep == wanted).all()
    assert found.value.tolist() == [[0, 1]]


def test_shifted_at_the_best_choice_is_above_its_truth():
    """The choice of least θ_ô is at least as good as its own promise, and that better than the family at 0."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(1, 1, 1, 12, generator=generator).mul(2).double().softmax(-1)
    values, blocks = torch.randn(1, 1, 12, 3, generator=generator).double(), torch.randn(1, 3, 5, generator=generator).double()
    best = minimal_theta_o_hat(weights, values, blocks, 4)
    zero = torch.zeros(1, 1, 1, 3).double()
    assert float(perturbation(weights, values, blocks, best.keep)) <= float(best.value)
    assert float(best.value) <= float(shifted(weights, values, blocks, best.keep, zero))


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=60), st.integers(1, 20))
def test_the_least_are_those_of_a_stable_sort(values, count):
    values = torch.tensor(values, dtype=torch.float64)
    assert least_of(values, count).tolist() == sorted(range(len(values)), key=lambda place: float(values[place]))[:count]
