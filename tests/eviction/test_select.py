"""Selections keep exactly what their formula says, and always as many as the budget."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from records import record

from eviction import Observation
from eviction.accumulate import SnapKV
from eviction.observation import recent
from eviction.select import AttentionOnly, Centred, Defensive, RatioOptimum, Scores, SingleEviction, TwoStage, Weighted
from eviction.select.top import top
from perturbation import perturbation

SELECTIONS = [
    AttentionOnly(),
    AttentionOnly("max"),
    TwoStage(),
    TwoStage(0.3, 0.0, "budget", group="mean of products"),
    Weighted(),
    Centred(),
    SingleEviction(window=3),
    SingleEviction(window=3, space="value"),
    Defensive(),
    RatioOptimum(window=3),
]


@st.composite
def decisions(draw):
    """Scores with ties and zeros, two of them, and counts per head that leave room beside the protected entries; rows with pads."""
    batch, kv_heads, keys = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([1, 2, 4, 1000]))  # few levels make ties
    first, second = (torch.from_numpy(rng.integers(0, levels, (batch, kv_heads, keys)) / levels) for _ in range(2))
    rows = draw(st.sampled_from([1, kv_heads]))  # heads alike, or each with entries of its own
    role = torch.from_numpy(rng.integers(0, 3, (batch, rows, keys)))  # pad, free, protected
    role[..., -1] = 2
    counts = torch.tensor(
        [
            [draw(st.integers(int((own == 2).sum()), int((own > 0).sum()))) for own in row]
            for row in role.expand(-1, kv_heads, -1)
        ]
    )
    return Scores(first, role == 2, role == 1, second), counts


def ranked(scores, among, count):
    """The best `count` positions of `among` by (score, earlier position first), sorted by plain Python."""
    return set(sorted(among, key=lambda i: (-scores[i], i))[:count])


def places(mask):
    return set(mask.nonzero().flatten().tolist())


@given(decisions())
def test_attention_only_keeps_the_top_and_the_protected(drawn):
    scores, counts = drawn
    keep = AttentionOnly().choose(scores, counts).keep
    for b, k in np.ndindex(*counts.shape):
        held, free = places(scores.protected.expand_as(scores.first)[b, k]), places(scores.free.expand_as(scores.first)[b, k])
        expected = held | ranked(scores.first[b, k].tolist(), free, int(counts[b, k]) - len(held))
        assert places(keep[b, k]) == expected


@given(decisions(), st.sampled_from([0.0, 0.25, 0.29, 0.5, 0.7, 1.0]), st.sampled_from(["free", "budget"]))
def test_two_stage_is_algorithm_1(drawn, alpha, share_of):
    scores, counts = drawn
    decision = TwoStage(alpha, share_of=share_of).choose(scores, counts)
    for b, k in np.ndindex(*counts.shape):
        held, free = (places(part.expand_as(scores.first)[b, k]) for part in (scores.protected, scores.free))
        count = int(counts[b, k])
        share = (count - len(held)) * round(alpha * 100) // 100
        first = share if share_of == "free" else max(count * round(alpha * 100) // 100 - len(held), 0)
        stage1 = ranked(scores.first[b, k].tolist(), free, first)
        stage2 = ranked(scores.second[b, k].tolist(), free - stage1, count - len(held) - first)
        assert places(decision.stage1[b, k]) == stage1 | held
        assert places(decision.keep[b, k]) == stage1 | stage2 | held


@given(decisions())
def test_alpha_1_is_attention_only(drawn):
    assert torch.equal(TwoStage(alpha=1.0).choose(*drawn).keep, AttentionOnly().choose(*drawn).keep)


@pytest.mark.parametrize("select", SELECTIONS, ids=lambda select: type(select).__name__)
@given(st.integers(0, 2**32 - 1), st.tuples(st.integers(0, 6), st.integers(0, 6)), st.data())
def test_every_selection_is_exact_to_the_entry_and_keeps_no_pad(select, seed, pads, data):
    made = record(batch=2, keys=14, queries=4, pads=pads, seed=seed)
    seen = Observation(made)
    protected = recent(seen.valid, 2)
    free = seen.valid & ~protected
    scores = select.scores(SnapKV(4, 3)(seen, protected), seen, protected, free)
    counts = torch.tensor([[data.draw(st.integers(2, int(row.sum()))) for _ in range(2)] for row in seen.valid[:, 0]])
    keep = select.choose(scores, counts).keep
    assert torch.equal(keep.sum(-1), counts)
    assert not (keep & ~seen.valid).any()
    assert (keep | ~protected).all()


def written(made):
    """ν [batch, heads, keys, model_dim] by hand."""
    blocks = made.output_projection.module.weight.data.T.reshape(made.n_heads, -1, 12)
    return np.einsum("bhnd,hde->bhne", made.values.repeat_interleave(made.group, 1).numpy(), blocks.numpy())


@pytest.mark.parametrize("norm", [1, 2])
def test_scores_are_their_formulas(norm):
    made = record(batch=2, queries=6, keys=15, pads=(0, 3), seed=5)
    seen = Observation(made)
    protected = recent(seen.valid, 3)
    free = seen.valid & ~protected
    importance = SnapKV(4, 3)(seen, protected)
    nu, given_scores = written(made), (importance, seen, protected, free)
    sizes = np.linalg.norm(nu, ord=norm, axis=-1)
    group = lambda numbers: np.asarray(numbers).reshape(2, 2, 2, -1).mean(2)  # noqa: E731
    attention = importance.numpy()

    two = TwoStage(0.5, 1e-3, norm=norm).scores(*given_scores)
    np.testing.assert_allclose(two.second, (group(attention) + 1e-3) * group(sizes))
    two = TwoStage(0.5, 1e-3, norm=norm, epsilon_of="uniform", group="mean of products").scores(*given_scores)
    relative = 1e-3 / np.array([15, 12])[:, None, None]
    np.testing.assert_allclose(two.second, group((attention + relative) * sizes))
    np.testing.assert_allclose(Weighted(norm).scores(*given_scores).first, group(attention * sizes))
    of_means = Weighted(norm, "product of means").scores(*given_scores).first
    np.testing.assert_allclose(of_means, group(attention) * group(sizes))
    plain = np.linalg.norm(made.values.repeat_interleave(made.group, 1).numpy(), ord=norm, axis=-1)
    np.testing.assert_allclose(Weighted(norm, space="value").scores(*given_scores).first, group(attention * plain))

    weights = seen.weights.numpy()
    looking = made.query_valid.numpy()
    outputs = np.einsum("bhtn,bhne->bhte", weights, nu)
    mean = np.stack([outputs[b][:, looking[b]].mean(1) for b in range(2)])
    distances = np.linalg.norm(nu - mean[:, :, None], ord=norm, axis=-1)
    np.testing.assert_allclose(Centred(norm).scores(*given_scores).first, group(attention * distances), rtol=1e-8)
    ratio = RatioOptimum(4, norm).scores(*given_scores)
    np.testing.assert_allclose(ratio.second, group(distances), rtol=1e-8)

    worst = attention.reshape(2, 2, 2, -1).max(2)
    floor = np.stack([worst[b][:, free[b, 0]].mean(-1) for b in range(2)])[..., None]
    norms = group(sizes)
    expected = np.maximum(worst, floor) * norms / norms.mean(-1, keepdims=True)
    np.testing.assert_allclose(Defensive(norm).scores(*given_scores).first, expected)

    single = SingleEviction(2, norm=norm).scores(*given_scores).first
    for entry in range(4, 15):
        keep = torch.ones(2, 2, 15, dtype=torch.bool)
        keep[..., entry] = False
        errors = perturbation(seen.weights[:, :, -2:], made.values, made.projection_blocks, keep, norm=norm, level="group")
        torch.testing.assert_close(single[..., entry], errors.mean(-1))


def test_caote_in_value_space_is_its_formula():
    made = record(queries=3, keys=10)
    seen = Observation(made)
    protected = recent(seen.valid, 1)
    got = SingleEviction(1, space="value").scores(torch.ones(1, 4, 10), seen, protected, ~protected).first
    weights, values = seen.weights[0, :, -1].numpy(), made.values[0].numpy()
    for k, i in np.ndindex(2, 10):
        heads = []
        for h in (2 * k, 2 * k + 1):
            share = weights[h, i] / (1 - weights[h, i])
            heads.append(share * np.linalg.norm(weights[h] @ values[k] - values[k, i]))
        np.testing.assert_allclose(got[0, k, i], np.mean(heads), rtol=1e-9)


def test_the_ratio_optimum_is_no_worse_than_the_top_of_its_terms():
    made = record(kv_heads=1, group=1, queries=1, keys=40, seed=2)
    seen = Observation(made)
    protected = recent(seen.valid, 1)
    scores = RatioOptimum(1).scores(torch.ones(1, 1, 40), seen, protected, ~protected)
    counts = torch.tensor([[8]])

    def ratio(keep):
        lost = (scores.first * scores.second * ~keep).sum()
        return float(lost / (scores.first * keep).sum())

    best = ratio(RatioOptimum(1).choose(scores, counts).keep)
    greedy = Scores(scores.first * scores.second, protected, ~protected)
    assert best <= ratio(AttentionOnly().choose(greedy, counts).keep) + 1e-12


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


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (TwoStage, {"alpha": 1.2}, "alpha lies in"),
        (TwoStage, {"alpha": float("nan")}, "alpha lies in"),
        (TwoStage, {"epsilon": -1.0}, "epsilon must be"),
        (TwoStage, {"epsilon": float("inf")}, "epsilon must be"),
        (TwoStage, {"share_of": "half"}, "share_of"),
        (TwoStage, {"norm": 3}, "norm"),
        (AttentionOnly, {"group": "sum"}, "group"),
        (Weighted, {"norm": 0}, "norm"),
        (Weighted, {"space": "heads"}, "space"),
        (SingleEviction, {"space": "key"}, "space"),
        (RatioOptimum, {"window": 0}, "window must be"),
    ],
)
def test_parameters_outside_their_range_are_refused(cls, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        cls(**settings)
