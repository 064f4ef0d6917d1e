"""Signs that measure the Fisher information: unbiased, exact between the likeliest tokens, the same on every machine."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eviction.signs import Asked, balanced_signs, directions


@given(st.integers(1, 9), st.integers(2, 40), st.integers(0, 1000))
def test_signs_are_signs_and_draws_of_a_query_depend_on_its_seed_alone(signs, vocabulary, seed):
    p = torch.rand(2, 3, vocabulary, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    drawn = torch.stack(list(balanced_signs(p, signs, [seed, 5, 7])))
    assert drawn.shape == (signs, 2, 3, vocabulary)
    assert (drawn.abs() == 1).all()
    alone = torch.stack(list(balanced_signs(p[1:, 1:2], signs, [5])))
    assert torch.equal(drawn[:, 1:, 1:2], alone)


@pytest.mark.parametrize("signs", [1, 2, 4, 8, 16])
def test_draws_do_not_confuse_the_likeliest_tokens(signs):
    p = torch.rand(1, 1, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    drawn = torch.stack(list(balanced_signs(p, signs, [3])))[:, 0, 0]
    products = drawn.T @ drawn / signs
    order = p[0, 0].argsort(descending=True)
    for first in range(50 - signs):
        among = order[first : first + signs]
        torch.testing.assert_close(products[among][:, among], torch.eye(signs, dtype=torch.float64))


@pytest.mark.parametrize("signs", [3, 8])
def test_the_mean_outer_product_of_the_directions_is_the_fisher_information(signs):
    logits = 3 * torch.randn(1, 4000, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[:, :1].expand(
        -1, 4000, -1
    )
    found = directions(logits, Asked(signs, seed=2), 0)[:, 0]  # [signs, queries, vocabulary]; every query has signs of its own
    p = logits[0, 0].softmax(-1)
    information = torch.diag(p) - torch.outer(p, p)
    mean = torch.einsum("sqa,sqb->ab", found, found) / found.shape[0] / found.shape[1]
    torch.testing.assert_close(mean, information, rtol=0.05, atol=0.01)
    torch.testing.assert_close(
        found.sum(-1), torch.zeros_like(found[..., 0]), atol=1e-12, rtol=0
    )  # a shift of all logits changes nothing


def test_balanced_draws_are_nearer_to_the_information_than_independent_ones():
    logits = 4 * torch.randn(1, 300, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    change = torch.randn(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = logits[0].softmax(-1)
    exact = (p * change.square()).sum(-1) - (p * change).sum(-1).square()
    balanced = (directions(logits, Asked(8), 0)[:, 0] @ change).square().mean(0)
    epsilon = 2.0 * torch.randint(0, 2, (8, 300, 200), generator=torch.Generator().manual_seed(2)) - 1
    along = p.sqrt() * epsilon
    independent = ((along - p * along.sum(-1, keepdim=True)) @ change).square().mean(0)
    spread = [float(((found / exact) - 1).square().mean()) for found in (balanced, independent)]
    assert spread[0] < 0.6 * spread[1]  # half of it here
