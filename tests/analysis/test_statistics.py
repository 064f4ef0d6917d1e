"""Intervals cover what they should, ratios are not confused, comparisons are paired."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_rows import samples
from scipy import stats

from analysis.schema import FULL
from analysis.scores import predictors, scores
from analysis.statistics import (
    adjusted,
    compare,
    mean,
    mean_of_ratios,
    mean_score,
    proportion,
    rank_correlation,
    ratio_of_means,
    win_rate,
)

NUMBERS = st.lists(st.floats(-10, 10).map(lambda value: round(value, 3)), min_size=2, max_size=12)


@settings(max_examples=40)
@given(NUMBERS, st.integers(0, 9))
def test_a_mean_lies_in_its_interval_and_the_interval_in_the_values(values, seed):
    found = mean(values, seed)
    assert found.value == pytest.approx(np.mean(values))
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found.low - 1e-9 <= found.value <= found.high + 1e-9
    assert mean(values, seed) == found


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = sum(low <= 1 <= high for _, low, high in (mean(rng.exponential(size=40)) for _ in range(200)))
    assert 175 <= covered <= 199  # 95 % of 200, the skew of the exponential taking a little
    right = sum(low <= 0.1 <= high for _, low, high in (proportion(int(rng.binomial(30, 0.1)), 30) for _ in range(300)))
    assert 275 <= right <= 299


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_is_its_formula(case):
    successes, trials = case
    z, share = stats.norm.ppf(0.975), successes / trials
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    found = proportion(successes, trials)
    assert found == pytest.approx((share, max(middle - half, 0), min(middle + half, 1)), abs=1e-9)


def test_all_right_of_few_is_no_certainty():
    assert mean_score([1.0] * 10) == proportion(10, 10)
    assert mean_score([1.0] * 10).low == pytest.approx(0.722, abs=1e-3)
    assert mean_score([0.2, 0.9]) == mean([0.2, 0.9])
    with pytest.raises(ValueError, match=r"scores lie in \[0, 1\], not in \[0, 85\]"):
        mean_score([0, 85])


def test_a_mean_of_no_nats_is_no_proportion():
    assert mean([0.0] * 10) == (0, 0, 0)
    assert mean_of_ratios([2.0, 3.0], [2.0, 3.0]) == (1, 1, 1)


@pytest.mark.parametrize("pairs", [5, 14, 60])
def test_flips_are_judged_by_the_exact_sign_test_however_many_pairs_stay(pairs):
    base = [1.0] * pairs
    assert compare([0.0] * 5 + base[5:], base).p == pytest.approx(2 * 0.5**5)
    with pytest.raises(ValueError, match="3 successes of 2 trials"):
        proportion(3, 2)


def test_the_ratio_of_means_is_not_the_mean_of_ratios():
    above, below = [1.0, 30.0], [1.0, 10.0]
    assert ratio_of_means(above, below).value == pytest.approx(31 / 11)
    assert mean_of_ratios(above, below).value == 2
    with pytest.raises(ValueError, match="1 of 2 values to divide by are 0"):
        mean_of_ratios(above, [1.0, 0.0])
    assert math.isnan(ratio_of_means([1.0, 2.0], [0.0, 0.0]).value)


def test_pairs_are_drawn_together():
    rng = np.random.default_rng(0)
    hard = rng.exponential(size=40)  # what makes a context hard makes it hard for both
    assert ratio_of_means(0.5 * hard, hard) == pytest.approx((0.5, 0.5, 0.5))
    noisy = 0.5 * hard + 0.1 * rng.random(40)
    found = ratio_of_means(noisy, hard)
    assert found.low < found.value < found.high
    assert ratio_of_means(noisy, hard) == found
    assert math.isnan(ratio_of_means([1.0], [2.0]).low)
    assert compare(noisy, hard).high - compare(noisy, hard).low < mean(hard).high - mean(hard).low


@settings(max_examples=40)
@given(NUMBERS, st.data())
def test_a_comparison_is_the_signed_rank_test_of_the_differences(base, data):
    other = data.draw(st.lists(st.floats(-10, 10).map(lambda value: round(value, 2)), min_size=len(base), max_size=len(base)))
    found = compare(other, base)
    difference = np.array(other) - np.array(base)
    assert found.value == pytest.approx(difference.mean())
    assert 0 <= found.p <= 1
    if not difference.any():
        assert found.p == 1
    back = compare(base, other)
    assert back.p == pytest.approx(found.p)
    assert back.value == pytest.approx(-found.value)


def test_changes_of_0_and_1_are_no_proportion():
    assert compare([1.0, 1.0, 0.0], [1.0, 1.0, 0.0])[:3] == (0, 0, 0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_adjusted_p_values_follow_benjamini_and_hochberg(p):
    count, order = len(p), sorted(range(len(p)), key=lambda place: p[place])
    expected, least = [0.0] * count, 1.0
    for rank in range(count, 0, -1):
        place = order[rank - 1]
        least = min(least, p[place] * count / rank)
        expected[place] = least
    assert adjusted(p) == pytest.approx(expected)
    assert adjusted([*p, float("nan")])[:-1] == pytest.approx(expected)


def test_a_win_rate_leaves_ties_out():
    assert win_rate([1, 2, 3, 3], [0, 3, 1, 3]) == proportion(2, 3)
    assert win_rate([1, 2, 3, 3], [0, 3, 1, 3], lower=True) == proportion(1, 3)
    assert math.isnan(win_rate([1], [1]).value)


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=15))
def test_rank_correlation_is_spearmans(pairs):
    one, other = map(list, zip(*pairs, strict=True))
    found = rank_correlation(one, other, resamples=50)
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert math.isnan(found.value)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found.value == pytest.approx(stats.spearmanr(one, other).statistic)
    assert not found.low > found.high


def test_rows_of_one_sample_are_drawn_together():
    rng = np.random.default_rng(0)
    level = np.repeat(rng.normal(size=8), 50)  # eight samples of fifty rows each: the rows of one say the same
    one, other = level + 0.1 * rng.normal(size=400), level + 0.1 * rng.normal(size=400)
    alone = rank_correlation(one, other, resamples=200)
    together = rank_correlation(one, other, list(np.repeat(np.arange(8), 50)), resamples=200)
    assert together.value == alone.value
    assert together.high - together.low > 2 * (alone.high - alone.low)
    with pytest.raises(ValueError, match="2 samples are named for 3 rows"):
        rank_correlation([1, 2, 3], [1, 2, 3], [0, 1])


def test_what_is_missing_is_refused():
    with pytest.raises(ValueError, match="1 of 2 samples have no value"):
        mean([1.0, float("nan")])
    with pytest.raises(ValueError, match="2 and 1 samples are no pairs"):
        compare([1, 2], [1])
    with pytest.raises(ValueError, match=r"not an array of shape \(1, 2\)"):
        mean([[1.0, 2.0]])


def test_scores_are_means_against_the_full_caches_own_samples():
    found = scores(
        samples(lambda policy, budget, sample: float(sample < (8 if policy == FULL else 2 if policy == "snapkv" else 8)))
    )
    by = found.set_index(["policy", "budget"])
    assert by.loc[(FULL, 1.0), "score"] == 0.8
    assert by.loc[("snapkv", 0.2), ["score", "change", "flipped"]].tolist() == pytest.approx([0.2, -0.6, 6 / 8])
    assert by.loc[("snapkv", 0.2), ["flipped_low", "flipped_high"]].tolist() == pytest.approx(proportion(6, 8)[1:])
    assert by.loc[("fisher", 0.2), ["change", "p"]].tolist() == [0, 1]
    assert by.loc[("snapkv", 0.2), "p"] < 0.05 <= by.loc[("snapkv", 0.2), "p_adjusted"] * 2
    assert by["p_adjusted"].isna().tolist() == [True, False, False, False, False]
    assert by["bytes_share"].tolist() == pytest.approx([1, 0.2, 0.4, 0.2, 0.4])


def test_what_predicts_the_score_is_found_and_what_does_not_is_not():
    rng = np.random.default_rng(0)
    lost = {
        (policy, budget, sample): rng.random()
        for policy in ("snapkv", "fisher")
        for budget in (0.2, 0.4)
        for sample in range(10)
    }
    frame = samples(
        lambda policy, budget, sample: 1.0 if policy == FULL else 1 - lost[policy, budget, sample],
        perturbation=lambda policy, budget, sample: lost[policy, budget, sample],
    )
    frame["theta"] = rng.random(len(frame))
    found = predictors(frame).set_index(["task", "budget", "predictor"])
    assert found.loc[("all tasks", "all budgets", "perturbation"), "rho"] == pytest.approx(-1)
    assert found.loc[("vt", "all budgets", "kl"), "rho_high"] < -0.9
    assert found.loc[("all tasks", "0.2", "kl"), "rho"] == pytest.approx(-1)
    row = found.loc[("all tasks", "all budgets", "theta")]
    assert row["rho_low"] < 0 < row["rho_high"]
    assert row["rows"] == 40


def test_differences_between_tasks_predict_nothing_within_a_budget():
    rng = np.random.default_rng(1)
    parts = []
    for task, level in (
        ("easy", 0.1),
        ("hard", 0.5),
    ):  # the second loses more of both at the small budget, for reasons of its own
        frame = samples(
            lambda policy, budget, sample, level=level: (
                1.0 if policy == FULL else 1 - level * (budget < 0.3) - 0.1 * rng.random()
            ),
            perturbation=lambda policy, budget, sample, level=level: level * (budget < 0.3) + 0.1 * rng.random(),
        )
        parts.append(frame.assign(task=task, source=task))
    found = predictors(pd.concat(parts)).set_index(["task", "budget", "predictor"])
    row = found.loc[("all tasks", "0.2", "perturbation")]
    assert row["rho_low"] < 0 < row["rho_high"]


def test_tasks_of_one_file_have_scores_of_their_own():
    frame = samples(lambda policy, budget, sample: float(sample % 2))
    frame["task"] = ["even" if sample % 2 == 0 else "odd" for sample in frame["sample"]]
    found = scores(frame).set_index(["task", "policy", "budget"])
    assert found.loc[("even", FULL, 1.0), "score"] == 0
    assert found.loc[("odd", FULL, 1.0), "score"] == 1
    assert set(found["samples"]) == {5}


def test_a_ratio_has_an_interval_where_some_draws_divide_by_nothing():
    above, below = [0.5, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    found = ratio_of_means(above, below)
    assert found == pytest.approx((0.5, 0.5, 0.5))
