"""Selections keep exactly what their formula says, and always as many as the budget."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eviction.select import AttentionOnly, TwoStage
from eviction.select.top import top


@st.composite
def selections(draw):
    """Scores with ties and zeros, norms, and a budget that leaves room beside the protected entries."""
    batch, kv_heads, candidates = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([1, 2, 4, 1000]))  # few levels make ties
    scores = torch.from_numpy(rng.integers(0, levels, (batch, kv_heads, candidates)) / levels)
    norms = torch.from_numpy(rng.integers(0, 3, scores.shape) * 0.5)
    protected = draw(st.integers(0, 4))
    return scores, norms, draw(st.integers(protected, protected + candidates)), protected


def ranked(scores, count):
    """The best `count` positions by (score, earlier position first), sorted by plain Python."""
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


def as_sets(keep):
    return [[set(head.nonzero().flatten().tolist()) for head in row] for row in keep]


@given(selections())
def test_attention_only_keeps_the_top_and_the_protected(drawn):
    scores, _, entries, protected = drawn
    keep = AttentionOnly()(scores, entries, protected).keep
    candidates = scores.shape[-1]
    window = set(range(candidates, candidates + protected))
    expected = [[ranked(head.tolist(), entries - protected) | window for head in row] for row in scores]
    assert as_sets(keep) == expected


@given(
    selections(),
    st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0]),
    st.sampled_from([0.0, 1e-4, 1.0]),
    st.sampled_from(["free", "budget"]),
)
def test_two_stage_is_algorithm_1(drawn, alpha, epsilon, share_of):
    scores, norms, entries, protected = drawn
    decision = TwoStage(alpha, epsilon, share_of)(scores, entries, protected, norms)
    candidates = scores.shape[-1]
    window = set(range(candidates, candidates + protected))
    first = int(alpha * (entries - protected)) if share_of == "free" else max(int(alpha * entries) - protected, 0)
    for b in range(scores.shape[0]):
        for k in range(scores.shape[1]):
            stage1 = ranked(scores[b, k].tolist(), first)
            products = ((scores[b, k] + epsilon) * norms[b, k]).tolist()
            rest = sorted(set(range(candidates)) - stage1, key=lambda i: (-products[i], i))
            stage2 = set(rest[: entries - protected - first])
            assert as_sets(decision.keep)[b][k] == stage1 | stage2 | window
            assert as_sets(decision.stage1)[b][k] == stage1 | window


@given(selections(), st.floats(0, 1))
def test_every_selection_is_exact_to_the_entry(drawn, alpha):
    scores, norms, entries, protected = drawn
    for select in (AttentionOnly(), TwoStage(alpha), TwoStage(alpha, share_of="budget")):
        keep = select(scores, entries, protected, norms).keep
        assert (keep.sum(-1) == entries).all()
        assert protected == 0 or keep[..., -protected:].all()


@given(selections())
def test_alpha_1_is_attention_only(drawn):
    scores, norms, entries, protected = drawn
    assert torch.equal(
        TwoStage(alpha=1.0)(scores, entries, protected, norms).keep, AttentionOnly()(scores, entries, protected).keep
    )


def test_equal_scores_are_kept_by_position_even_when_there_are_thousands():
    keep = top(torch.zeros(3, 5000), 17)
    assert keep[:, :17].all()
    assert not keep[:, 17:].any()


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="1 scores are NaN"):
        top(torch.tensor([0.0, torch.nan]), 1)


def test_more_entries_than_there_are_are_refused():
    with pytest.raises(ValueError, match="cannot keep 3 of 2"):
        top(torch.ones(2), 3)


def test_two_stage_without_norms_says_so():
    with pytest.raises(ValueError, match="needs the norms"):
        TwoStage()(torch.ones(1, 1, 4), 2, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.2}, "alpha lies in"),
        ({"alpha": float("nan")}, "alpha lies in"),
        ({"epsilon": -1.0}, "epsilon must be"),
        ({"epsilon": float("inf")}, "epsilon must be"),
    ],
)
def test_parameters_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TwoStage(**settings)
