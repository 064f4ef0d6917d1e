"""Budgets are exact to the entry, per row, within what a head has, and never nothing."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eviction import BudgetError
from eviction.allocate import AdaKV, Candidates, Global, HeadKV, PyramidKV, Uniform, apportion, require_room, uniform_entries


@st.composite
def layers(draw):
    """Layers of one model, with padded rows and protected entries; heads that hold the same, or each its own number."""
    batch, kv_heads, keys = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 12))
    count, apart = draw(st.integers(1, 4)), draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    rows = kv_heads if apart else 1
    place, made, base = torch.arange(keys), [], None
    for layer in range(count):
        lengths = torch.tensor([[draw(st.integers(1, keys)) for _ in range(rows)] for _ in range(batch)])
        if base is None or not apart:
            if base is None:
                base, same = torch.tensor([draw(st.integers(1, int(row.max()))) for row in lengths]), lengths
            lengths = same
        held = [
            [draw(st.integers(0, int(b) - 1)) if b < n else int(n) for n in row] for b, row in zip(base, lengths, strict=True)
        ]
        protected = torch.tensor(held)
        free = (place >= keys - lengths[..., None]) & (place < keys - protected[..., None])
        scores = torch.randint(0, 5, (batch, kv_heads, keys), generator=generator).double()
        made.append(Candidates(scores, free, protected, base, layer, count))
    return made


ALLOCATORS = {
    "uniform": lambda count, heads: Uniform(),
    "adakv mix": lambda count, heads: AdaKV(0.3, "mix"),
    "adakv forced": lambda count, heads: AdaKV(0.3, "forced"),
    "adakv no floor": lambda count, heads: AdaKV(0.0, "forced"),
    "global": lambda count, heads: Global(0.2),
    "pyramidkv": lambda count, heads: PyramidKV(),
    "headkv": lambda count, heads: HeadKV(
        tuple(tuple(float(head + layer) for head in range(2 * heads)) for layer in range(count))
    ),
}


@pytest.mark.parametrize("name", ALLOCATORS)
@given(layers())
def test_budgets_add_up_to_the_uniform_ones_within_what_there_is(name, made):
    allocate = ALLOCATORS[name](len(made), made[0].n_kv_heads)
    counts = allocate(made) if allocate.scope == "model" else [allocate([layer])[0] for layer in made]
    for row in range(made[0].scores.shape[0]):
        total, held = (sum(int(count[row].sum()) for count in part) for part in (counts, [layer.held for layer in made]))
        parts = [made] if allocate.scope == "model" else [[layer] for layer in made]
        if name == "uniform":
            there = [(int(layer.base[row]), int(n)) for layer in made for n in (layer.held + layer.most)[row]]
            assert total == sum(min(pair) for pair in there)
        else:
            rooms, mosts = (
                [[int(getattr(layer, of)[row].sum()) for layer in part] for part in parts] for of in ("room", "most")
            )
            assert total - held == sum(min(sum(room), sum(most)) for room, most in zip(rooms, mosts, strict=True))
        if not any((layer.held > layer.base[:, None]).any() for layer in made):
            assert total <= sum(int(layer.base[row]) * layer.n_kv_heads for layer in made)
        for count, layer in zip(counts, made, strict=True):
            assert (count[row] >= layer.held[row]).all()
            assert (count[row] <= layer.held[row] + layer.most[row]).all()
            assert (count[row] >= 1).all()


@given(layers())
def test_a_joint_ranking_without_a_floor_keeps_the_highest_scores_of_the_layer(made):
    layer = made[0]
    (counts,) = AdaKV(0.0, "forced")([layer])
    for row in range(layer.scores.shape[0]):
        free = layer.free[row].expand(layer.n_kv_heads, -1)
        entries = [(h, float(layer.scores[row, h, i])) for h in range(layer.n_kv_heads) for i in free[h].nonzero().flatten()]
        ranked = sorted(range(len(entries)), key=lambda j: (-entries[j][1], j))
        # the first of each head with nothing protected comes first, so that none is left with nothing
        bare = [h for h in range(layer.n_kv_heads) if int(layer.held[row, h]) == 0]
        best = [next(j for j in ranked if entries[j][0] == h) for h in bare]
        ranked = (best + [j for j in ranked if j not in best])[: int(layer.room[row].sum())]
        wanted = [sum(entries[j][0] == h for j in ranked) + int(layer.held[row, h]) for h in range(layer.n_kv_heads)]
        assert counts[row].tolist() == wanted


@given(layers())
def test_a_floor_of_1_is_uniform(made):
    for rule in ("mix", "forced"):
        for layer in made:
            if layer.free.shape[1] == 1:  # else what a head lacks goes to the others
                assert torch.equal(AdaKV(1.0, rule)([layer])[0], Uniform()([layer])[0])


def test_forced_and_mixed_floors_differ_as_they_should():
    """One head holds all the high scores: forced leaves the other ⌊φ b⌋ entries, mixed φ b."""
    scores = torch.stack([torch.full((20,), 9.0), torch.zeros(20)])[None].double()
    layer = Candidates(scores, torch.ones(1, 1, 20, dtype=torch.bool), torch.tensor([[0]]), torch.tensor([10]), 0, 1)
    assert AdaKV(0.2, "forced")([layer])[0].tolist() == [[18, 2]]
    assert AdaKV(0.2, "mix")([layer])[0].tolist() == [[18, 2]]
    assert AdaKV(0.25, "forced")([layer])[0].tolist() == [[18, 2]]
    assert AdaKV(0.3, "mix")([layer])[0].tolist() == [[17, 3]]


def test_pyramidkv_falls_linearly_from_the_bottom_and_headkv_follows_its_scores():
    free, nothing = torch.ones(1, 1, 100, dtype=torch.bool), torch.tensor([[0]])
    made = [Candidates(torch.zeros(1, 2, 100).double(), free, nothing, torch.tensor([20]), layer, 3) for layer in range(3)]
    assert [count.tolist() for count in PyramidKV(beta=20)(made)] == [[[39, 39]], [[20, 20]], [[1, 1]]]
    scores = ((1.0, 1.0), (4.0, 0.0), (0.0, 0.0))
    counts = HeadKV(scores, beta=2)(made)  # a floor of 10 each; a pool of 60 by share
    assert [count.tolist() for count in counts] == [[[20, 20]], [[50, 10]], [[10, 10]]]


@pytest.mark.parametrize("name", ["pyramidkv", "headkv"])
def test_a_head_that_holds_much_more_than_the_next_adds_nothing_to_the_budget_of_the_model(name):
    """After an eviction that left each head its own entries: what it holds is more than the pyramid's top layer gives."""
    held = torch.tensor([[2, 8]])
    free = torch.arange(30) < 30 - held[..., None]
    made = [Candidates(torch.zeros(1, 2, 30).double(), free, held, torch.tensor([10]), layer, 3) for layer in range(3)]
    counts = ALLOCATORS[name](3, 2)(made)
    assert sum(int(count.sum()) for count in counts) == 3 * 2 * 10


@st.composite
def units(draw):
    """Shares, some of them 0, equal or far apart, with the limits of each."""
    share = st.one_of(st.floats(0, 100), st.sampled_from([0.0, 1.0, 1.5, 2.0]))
    drawn = draw(st.lists(st.tuples(share, st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=8))
    shares, least, more = [list(part) for part in zip(*drawn, strict=True)]
    return shares, least, [low + extra for low, extra in zip(least, more, strict=True)]


@given(units(), st.integers(0, 260))
def test_whole_numbers_add_up_within_their_limits(parts, total):
    shares, least, most = parts
    counts = apportion(shares, total, least, most)
    assert sum(counts) == min(max(total, sum(least)), sum(most))
    assert all(low <= count <= high for low, count, high in zip(least, counts, most, strict=True))


@given(units(), st.integers(0, 260))
def test_whole_numbers_are_the_next_to_one_multiple_of_the_shares_that_the_limits_stop(parts, total):
    """The multiple is found here by halving; where it has no end, those with a share have all that they can take."""
    shares, least, most = parts
    counts = apportion(shares, total, least, most)
    total = min(max(total, sum(least)), sum(most))
    full = sum(high if share else low for share, low, high in zip(shares, least, most, strict=True))
    if full < total:
        assert all(count == high for share, count, high in zip(shares, counts, most, strict=True) if share)
        return

    def stopped(power):
        scaled = [
            share * 2.0 ** (power / 2) * 2.0 ** (power / 2) for share in shares
        ]  # 2 ** power may be more than a float holds
        return [min(max(number, low), high) for number, low, high in zip(scaled, least, most, strict=True)]

    low, high = -1100.0, 1100.0  # of the multiple's logarithm
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(stopped(middle)) >= total else (middle, high)
    exact = stopped(high)
    assert all(abs(count - number) < 1 + 1e-6 for count, number in zip(counts, exact, strict=True))


@pytest.mark.parametrize("budget", [10, 40, 160, 190])
def test_a_pyramid_falls_from_layer_to_layer_also_where_the_lower_ones_are_full(budget):
    free, nothing = torch.ones(1, 1, 200, dtype=torch.bool), torch.tensor([[0]])
    made = [
        Candidates(torch.zeros(1, 3, 200).double(), free, nothing, torch.tensor([budget]), layer, 30) for layer in range(30)
    ]
    counts = PyramidKV()(made)
    assert all(len(set(count[0].tolist())) == 1 for count in counts)
    numbers = [int(count[0, 0]) for count in counts]
    assert sum(numbers) == 30 * budget
    assert all(above <= below for below, above in itertools.pairwise(numbers))
    full = numbers.count(200)
    assert (full > 1) == (budget >= 160)
    steps = [below - above for below, above in itertools.pairwise(numbers[full:])]
    assert max(steps) - min(steps) <= 1  # a line, in whole numbers


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=3), st.floats(0, 1, exclude_min=True), st.integers(1, 20_000))
def test_the_uniform_budget_is_the_nearest_entry_of_each_row_and_never_nothing(lengths, fraction, number):
    rows = torch.tensor(lengths)
    assert uniform_entries(fraction, rows).tolist() == [max(1, int(fraction * n + 0.5)) for n in lengths]
    assert uniform_entries(number, rows).tolist() == [min(number, n) for n in lengths]


@given(st.integers(1, 10_000), st.integers(0, 64), st.floats(0, 1, exclude_min=True))
def test_an_experiment_needs_room_beside_the_window_or_is_told_how_much(keys, protected, budget):
    protected = min(protected, keys)
    nearest = int(budget * keys + 0.5)
    if nearest > protected or nearest == keys:
        assert require_room(budget, keys, protected) == nearest
    else:
        with pytest.raises(BudgetError, match=f"at least {protected + 1} entries"):
            require_room(budget, keys, protected)


@pytest.mark.parametrize("budget", [0, -3, 0.0, -0.1, 1.01, float("nan")])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(BudgetError, match="budget"):
        uniform_entries(budget, torch.tensor([100]))
    with pytest.raises(BudgetError, match="budget"):
        require_room(budget, 100, 0)


def test_scores_that_do_not_fit_or_say_nothing_are_refused():
    layer = Candidates(torch.zeros(1, 2, 4).double(), torch.ones(1, 1, 4).bool(), torch.tensor([[0]]), torch.tensor([2]), 0, 1)
    with pytest.raises(ValueError, match="2 layers do not fit a model that attends in 1"):
        HeadKV(((1.0, 1.0), (1.0, 1.0)))([layer])
    with pytest.raises(ValueError, match="3 head scores do not fit the 2 KV heads of layer 0"):
        HeadKV(((1.0, 1.0, 1.0),))([layer])
    with pytest.raises(ValueError, match="not all 0"):
        HeadKV(((0.0, 0.0),))
    with pytest.raises(ValueError, match="beta"):
        PyramidKV(beta=0.5)
    with pytest.raises(ValueError, match="floor"):
        AdaKV(floor=1.2)
