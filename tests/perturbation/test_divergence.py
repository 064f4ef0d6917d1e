"""KL and agreement against scipy."""

import numpy as np
import scipy.special
import torch
from hypothesis import given
from hypothesis import strategies as st

from perturbation import agreement, kl_divergence


@given(st.integers(1, 4), st.integers(1, 20), st.floats(0.01, 30), st.integers(0, 2**32 - 1))
def test_kl_equals_scipy_and_is_never_negative(rows, vocabulary, spread, seed):
    rng = np.random.default_rng(seed)
    p, q = rng.normal(size=(2, rows, vocabulary)) * spread
    expected = scipy.special.rel_entr(scipy.special.softmax(p, -1), scipy.special.softmax(q, -1)).sum(-1)
    got = kl_divergence(torch.from_numpy(p), torch.from_numpy(q))
    np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-10)
    assert (got >= -1e-12).all()


def test_equal_logits_up_to_a_shift_have_no_divergence_even_where_a_token_is_impossible():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    torch.testing.assert_close(kl_divergence(logits, logits + 7), torch.zeros(1, dtype=torch.float64), atol=1e-15, rtol=0)


def test_agreement_is_about_the_likeliest_token():
    full = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    other = torch.tensor([[0.0, 1.1, 1.0], [0.0, 2.0, 1.0]])
    assert agreement(full, other).tolist() == [True, False]
