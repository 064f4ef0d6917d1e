"""Removals counted together: sketches tell the KL of pairs and sets, and greedy selection is what its rule says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import prompt, tiny
from scipy.stats import spearmanr

from eviction import Policy, policy, prefill
from eviction.accumulate import SnapKV
from eviction.live import Sketch
from eviction.looked import look
from eviction.select import Greedy, Scores
from hooks import capture
from perturbation.removal import Removals


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sketches_tell_the_kl_of_removing_two_entries_together(family):
    used, tokens = tiny(family, dtype=torch.float64), prompt(24)
    looked = look(used, tokens, window=1)
    removals = Removals.of(used, tokens[:, :-1], tokens[:, -1:])
    chosen = policy("fisher+greedy", window=1, signs=2048, pool=100.0)
    for layer, seen in enumerate(looked.seen_by(chosen, 1.0)):
        sketch = seen.sketch
        torch.testing.assert_close(sketch.along.square().sum(-1), seen.nats.gather(-1, sketch.pool))
        assert sketch.pool.shape[-1] == 24
        by_entry = torch.zeros_like(sketch.along).scatter(2, sketch.pool[..., None].expand_as(sketch.along), sketch.along)[0]
        pairs = [(i, j) for i in range(0, 22, 2) for j in range(i + 1, 23, 3)]
        keep = torch.ones(len(pairs), seen.n_kv_heads, 23, dtype=torch.bool)
        for row, pair in enumerate(pairs):
            keep[row, :, list(pair)] = False  # of every head
        exact = removals.without({layer: keep}).kl[:, 0]
        guess = torch.stack([by_entry[:, list(pair)].sum((0, 1)).square().sum() for pair in pairs])
        assert spearmanr(exact, guess)[0] > 0.97
        assert 0.8 < guess.sum() / exact.sum() < 1.2


@torch.no_grad()
def test_what_is_outside_the_pool_is_summed():
    looked = look(tiny("llama", dtype=torch.float64), prompt(30), window=3)
    (whole, part) = (
        looked.seen_by(policy("fisher+greedy", window=3, pool=pool, sink=1), budget)[1].sketch
        for pool, budget in ((9.0, 1.0), (1.5, 8))
    )
    assert part.pool.shape[-1] == 12
    torch.testing.assert_close(part.along.sum(2) + part.rest, whole.along.sum(2) + whole.rest)
    assert {0, 27, 28, 29} <= set(part.pool[0, 0].tolist())  # what is kept anyway is in it


def naive(along, rest, first, protected, free, pool, count, weight) -> set[int]:
    """One entry after the other, in loops."""
    gone = rest.clone()
    left = [place for place in pool.tolist() if free[place]]
    rows = {place: along[row] for row, place in enumerate(pool.tolist())}
    while len(left) + int(protected.sum()) > count:
        cost = {}
        for place in left:
            own = float((rows[place] ** 2).sum())
            cost[place] = max(float(first[place]), own) + 2 * weight * float((rows[place] * gone).sum())
        out = min(left, key=lambda place: (cost[place], -place))
        gone += rows[out]
        left.remove(out)
    return set(left) | set(protected.nonzero().flatten().tolist())


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 12))
def test_with_many_rounds_one_entry_goes_at_a_time(seed, weight, count):
    generator = torch.Generator().manual_seed(seed)
    keys, size = 14, 12
    protected = torch.zeros(1, 1, keys, dtype=torch.bool)
    protected[..., -1] = True
    chosen = torch.randperm(keys - 1, generator=generator)[: size - 1].sort().values
    pool = torch.cat([chosen, torch.tensor([keys - 1])])[None, None]
    sketch = Sketch(pool)
    sketch.along = torch.randn(1, 1, size, 4, generator=generator, dtype=torch.float64)
    sketch.rest = torch.randn(1, 1, 4, generator=generator, dtype=torch.float64)
    first = torch.zeros(1, 1, keys, dtype=torch.float64).scatter(2, pool, sketch.along.square().sum(-1))
    first[..., 3] += 0.7  # dilated
    scores = Scores(first, protected, ~protected, sketch=sketch)
    found = Greedy(weight=weight, rounds=64).choose(scores, torch.tensor([[count]])).keep[0, 0]
    expected = naive(
        sketch.along[0, 0], sketch.rest[0, 0], first[0, 0], protected[0, 0], ~protected[0, 0], pool[0, 0], count, weight
    )
    assert set(found.nonzero().flatten().tolist()) == expected


@torch.no_grad()
@pytest.mark.parametrize("budget", [3, 8, 0.5, 1.0])
def test_counts_are_those_of_the_ranking_by_single_removals(budget):
    used, tokens = tiny("llama", dtype=torch.float64), prompt(30, batch=2)
    settings = {"window": 3, "sink": 1}
    greedy, single = (prefill(used, tokens, policy(name, **settings), budget) for name in ("fisher+greedy", "fisher"))
    for one, other in zip(greedy.decisions, single.decisions, strict=True):
        assert torch.equal(one.keep.sum(-1), other.keep.sum(-1))
    nothing = prefill(used, tokens, policy("fisher+greedy", weight=0.0, **settings), budget)
    for one, other in zip(nothing.decisions, single.decisions, strict=True):
        assert torch.equal(one.keep, other.keep)


@torch.no_grad()
def test_it_says_what_it_needs():
    used = tiny("llama")
    with capture(used, window=4) as captured:
        used(prompt(20))
    with pytest.raises(ValueError, match=r"use it as fisher\+greedy"):
        Policy("mine", SnapKV(window=4), select=Greedy()).score(captured[0], 0.5)
    with pytest.raises(ValueError, match="needs the model to run again"):
        policy("fisher+greedy", window=4).score(captured[0], 0.5)


@torch.no_grad()
@pytest.mark.parametrize("budget", [0.3, 0.4, 9])
def test_a_padded_row_decides_as_it_does_alone(budget):
    used, tokens = tiny("llama", dtype=torch.float64), prompt(60, batch=2)
    mask = torch.ones_like(tokens)
    mask[1, :30] = 0
    chosen = policy("fisher+greedy", window=4, sink=1)
    together = prefill(used, tokens, chosen, budget, attention_mask=mask).keep
    alone = prefill(used, tokens[1:, 30:], chosen, budget).keep
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one[1:, :, 30:], other)
