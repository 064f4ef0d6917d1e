"""KL from logits is at most Bennett's bound, which is at most Hoeffding's; where δz takes two values Bennett's is the KL."""

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bounds import bennett, hoeffding

SIZES = st.sampled_from([0.0, 1e-12, 1e-8, 1e-4, 1e-2, 0.3, 1.0, 5.0, 60.0, 2000.0])


def exact(full: np.ndarray, evicted: np.ndarray) -> float:
    """Σ p (log p − log p') in 60 digits, of which cancellation leaves 40."""
    with mpmath.workdps(60):
        z, other = ([mpmath.mpf(float(one)) for one in logits] for logits in (full, evicted))
        of_full, of_other = (mpmath.log(mpmath.fsum(map(mpmath.exp, one))) for one in (z, other))
        terms = [mpmath.exp(one - of_full) * (one - of_full - two + of_other) for one, two in zip(z, other, strict=True)]
        return float(mpmath.fsum(terms))


@st.composite
def logits(draw):
    size = draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    full = rng.normal(size=size) * draw(SIZES)
    if draw(st.booleans()):
        full[rng.integers(size)] += 50  # almost all on one token
    change = rng.normal(size=size) * draw(SIZES)
    if draw(st.booleans()):
        change = np.where(rng.random(size) < 0.5, change[0], change[-1])  # two values
    return full, full + change + draw(st.sampled_from([0.0, 3.0, -1e3]))


@given(logits())
@example((np.zeros(2), np.array([0.0, 1e-9])))
@example((np.array([0.0, -700.0]), np.array([0.0, 50.0])))
def test_kl_is_at_most_bennett_is_at_most_hoeffding(given_logits):
    full, evicted = given_logits
    kl = exact(full, evicted)
    tight, loose = (float(bound(torch.from_numpy(full), torch.from_numpy(evicted))) for bound in (bennett, hoeffding))
    rounded = 1e-15 * np.abs(evicted - full).max()  # of a change that is a difference of large logits
    slack = rounded * np.ptp(evicted - full) + rounded**2 + 1e-40
    assert kl <= tight * (1 + 1e-9) + slack
    assert tight <= loose * (1 + 1e-9) + slack


@given(st.floats(1e-6, 1 - 1e-6), st.sampled_from([1e-6, 1e-3, 0.1, 0.99, 1.01, 3.0, 100.0]))
def test_where_the_change_takes_two_values_bennett_is_the_kl(share, size):
    full = np.log(np.array([1 - share, share]))
    for change in (np.array([0.0, size]), np.array([size, 0.0])):
        found = float(bennett(torch.from_numpy(full), torch.from_numpy(full + change)))
        expected = exact(full, full + change)
        assert found == pytest.approx(expected, rel=1e-6)


def test_bounds_are_per_row_broadcast_and_ignore_shifts_and_impossible_tokens():
    torch.manual_seed(0)
    full, evicted = torch.randn(1, 4, 9), torch.randn(3, 4, 9)
    for bound in (hoeffding, bennett):
        found = bound(full, evicted)
        assert found.shape == (3, 4)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found[2, 1], bound(full[0, 1], evicted[2, 1]))
        torch.testing.assert_close(found, bound(full, evicted.double() + 5))
        nowhere = torch.full((1, 4, 2), -torch.inf)
        torch.testing.assert_close(
            found, bound(torch.cat([full, nowhere], -1), torch.cat([evicted, nowhere.expand(3, -1, -1)], -1))
        )
        assert bound(full, full + 3).abs().max() < 1e-12


@pytest.mark.parametrize("bound", [hoeffding, bennett])
def test_logits_of_which_nothing_finite_can_be_said_are_refused(bound):
    row = torch.tensor([0.0, 1.0])
    for broken, message in (
        (torch.tensor([0.0, torch.nan]), "NaN"),
        (torch.tensor([0.0, torch.inf]), "inf"),
        (torch.tensor([0.0, -torch.inf]), "1 logits are -inf in one"),
    ):
        with pytest.raises(ValueError, match=message):
            bound(row, broken)
    with pytest.raises(ValueError, match="everywhere"):
        bound(torch.full((2,), -torch.inf), torch.full((2,), -torch.inf))


@pytest.mark.parametrize(("share", "change"), [(1e-10, -20.0), (1e-13, -30.0), (1e-15, -40.0), (1e-10, 20.0)])
def test_an_unlikely_token_that_drops_is_bounded_too(share, change):
    full = np.array([np.log1p(-share), np.log(share)])
    evicted = full + np.array([0.0, change])
    found = float(bennett(torch.from_numpy(full), torch.from_numpy(evicted)))
    assert found == pytest.approx(exact(full, evicted), rel=1e-6)  # two values: the bound is the KL
