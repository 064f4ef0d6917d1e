"""Scores are RULER's and LongBench's: cases worked out by hand, and what holds for all of them."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from analysis.errors import InputError
from analysis.tasks import METRICS, Sample, metric
from analysis.tasks.longbench import KINDS


def sample(*answers: str, classes: tuple[str, ...] = ()) -> Sample:
    return Sample("task", 0, "context", "", "", answers, 8, classes)


# what a metric makes of a prediction, by hand
CASES = [
    ("all", "it is 12 and 34", sample("12", "34"), 1),
    ("all", "it is 12", sample("12", "34"), 1 / 2),
    ("all", "PARIS", sample("Paris"), 1),
    ("part", "it is 12", sample("12", "34"), 1),
    ("part", "it is 1", sample("12", "34"), 0),
    ("exact", "The Paris.", sample("paris"), 1),
    ("exact", "Paris, France", sample("paris"), 0),
    ("f1", "the red house", sample("a house"), 2 * (1 / 2) * 1 / (1 / 2 + 1)),
    ("f1", "the red house", sample("green", "red house"), 1),
    ("f1", "red red red", sample("red house"), 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
    ("f1", "blue", sample("red house"), 0),
    # the longest common subsequence of "a b c d" and "a c d e" is "a c d": precision and recall 3/4
    ("rouge-l", "a b c d", sample("a c d e"), 3 / 4),
    ("rouge-l", "...", sample("a b"), 0),
    ("classification", "It is Sport or Politics", sample("Sport", classes=("Sport", "Politics", "Art")), 1 / 2),
    ("classification", "It is Art", sample("Sport", classes=("Sport", "Politics", "Art")), 0),
    # "Date" is a part of the right label, and not counted against it
    ("classification", "Date of birth", sample("Date of birth", classes=("Date", "Date of birth", "Place")), 1),
    ("classification", "Date of birth", sample("Date", classes=("Date", "Date of birth", "Place")), 1 / 2),
    ("edit", "\n# a comment\nx = 1\ny = 2", sample("x = 1"), 1),
    # six letters, five the same on both sides: 1 − 2/12 by insertions and deletions
    ("edit", "abcdef", sample("abcdeg"), round(100 * 10 / 12) / 100),
    ("edit", "# only a comment", sample("x = 1"), 0),
    ("retrieval", "Paragraph 7, or 8", sample("Paragraph 7"), 1 / 2),
    ("retrieval", "none", sample("Paragraph 7"), 0),
    ("count", "There are 5, of 30.", sample("5"), 1 / 2),
    ("count", "55", sample("5"), 0),
]


@pytest.mark.parametrize(("name", "prediction", "asked", "score"), CASES)
def test_a_case_by_hand(name, prediction, asked, score):
    assert metric(name)(prediction, asked) == pytest.approx(score)


def test_labels_are_needed_where_they_decide():
    with pytest.raises(InputError, match="classification needs the labels, in the column all_classes"):
        metric("classification")("Sport", sample("Sport"))


TEXT = st.text(st.sampled_from("ab cd.12#\n"), max_size=30)


@given(st.sampled_from(sorted(METRICS)), TEXT, st.lists(TEXT, min_size=1, max_size=3))
def test_scores_lie_between_0_and_1_and_another_answer_never_lowers_the_best(name, prediction, answers):
    assume(all(answer.strip() for answer in answers))
    asked = sample(*answers, classes=tuple(dict.fromkeys([*answers, "a", "b"])))
    score = metric(name)(prediction, asked)
    assert 0 <= score <= 1
    if name != "all":
        each = [metric(name)(prediction, sample(answer, classes=asked.classes)) for answer in answers]
        assert score == pytest.approx(max(each))


@given(
    st.lists(st.sampled_from(["red", "house", "tree", "9"]), min_size=1, max_size=8),
    st.sampled_from(["exact", "f1", "rouge-l", "all", "part"]),
)
def test_the_truth_scores_1(words, name):
    text = " ".join(words)
    assert metric(name)(text, sample(text)) == 1


def test_few_shot_tasks_are_scored_by_their_first_line():
    asked = sample("Anna", classes=("Anna", "Bert"))
    for name in ("trec", "triviaqa", "samsum"):
        rule = KINDS[name].metric
        assert rule("\nAnna\nQuestion: who else? Bert", asked) == 1
        assert rule("Bert\nAnna", asked) == 0
