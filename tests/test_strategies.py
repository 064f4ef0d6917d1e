"""The strategies reach the corners that they promise, and draw only what is well posed."""

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from strategies import Problem, problems


@given(problems())
def test_problems_are_well_posed(problem: Problem):
    torch.testing.assert_close(problem.weights.sum(-1) + problem.sink_mass, torch.ones_like(problem.sink_mass).double())
    assert (problem.weights >= 0).all()
    assert problem.keep.any(-1).all() or (problem.sink_mass > 0).any()


@given(problems(blind=False))
def test_every_query_keeps_something_that_it_looks_at_unless_it_may_be_blind(problem: Problem):
    assert (problem.sigma > 0).all()


CORNERS = {
    "σ below ½": lambda p: bool((p.sigma < 0.5).any()),
    "σ near 0": lambda p: bool(((p.sigma > 0) & (p.sigma < 1e-6)).any()),
    "σ = 0": lambda p: bool((p.sigma == 0).any()),
    "nothing kept but the sink": lambda p: bool((~p.keep.any(-1)).any()),
    "σ above ½ but below 1": lambda p: bool(((p.sigma > 0.5) & (p.sigma < 0.99)).any()),
    "one-hot attention": lambda p: p.weights.shape[-1] > 1 and bool((p.weights.amax(-1) == 1).all()),
    "ties": lambda p: p.weights.shape[-1] > 2 and bool((p.weights == p.weights[..., :1]).all()),
    "a shared component": lambda p: p.values.shape[2] > 2 and bool((p.values.std(2) < 0.1 * p.values.mean(2).abs()).all()),
    "zero values": lambda p: bool((p.values == 0).all()),
    "cancelling values": lambda p: (
        p.values.shape[2] > 1 and bool((p.values[:, :, 0] == -p.values[:, :, 1]).all()) and bool((p.values != 0).all())
    ),
    "values that W_O annihilates": lambda p: (
        bool(p.values.abs().sum() > 1e-3)
        and bool((p.values[:, 0] @ p.projection[0]).abs().max() < 0.05 * p.values[:, 0].abs().max())
    ),
    "a sink": lambda p: bool((p.sink_mass > 0.1).any()),
    "one head": lambda p: p.weights.shape[1] == 1,
    "a group of heads": lambda p: p.group == 3,
    "n = 1": lambda p: p.weights.shape[-1] == 1,
    "keep all": lambda p: p.weights.shape[-1] > 2 and bool(p.keep.all()),
    "a batch": lambda p: p.weights.shape[0] == 2,
}


@pytest.mark.parametrize("corner", CORNERS)
def test_problems_reach_the_corner(corner):
    find(
        problems(),
        CORNERS[corner],
        settings=settings(max_examples=3000, suppress_health_check=list(HealthCheck), database=None),
    )
