"""Budgets are exact to the entry, and impossible ones are refused with the number that would do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eviction import BudgetError
from eviction.allocate import Uniform


@given(st.integers(1, 10_000), st.integers(0, 64), st.floats(0, 1, exclude_min=True))
def test_a_fraction_is_rounded_to_the_nearest_entry_or_refused(keys, protected, budget):
    protected = min(protected, keys)
    nearest = int(budget * keys + 0.5)
    if nearest > protected or nearest == keys:
        assert Uniform()(budget, keys, protected) == nearest
    else:
        with pytest.raises(BudgetError, match=f"at least {protected + 1} entries"):
            Uniform()(budget, keys, protected)


@given(st.integers(1, 500), st.integers(1, 1000))
def test_a_number_of_entries_is_taken_as_it_is(keys, budget):
    assert Uniform()(budget, keys, 0) == min(budget, keys)


def test_a_budget_of_everything_holds_even_a_window_that_is_everything():
    assert Uniform()(1.0, 16, 16) == 16


@pytest.mark.parametrize("budget", [0, -3, 0.0, -0.1, 1.01, float("nan")])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(BudgetError, match="budget"):
        Uniform()(budget, 100, 0)
