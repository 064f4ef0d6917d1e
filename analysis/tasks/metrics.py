"""How an answer is scored, in [0, 1]: RULER's and LongBench's rules, by name."""

import re
import string
from collections import Counter
from collections.abc import Callable

from analysis.errors import InputError
from analysis.tasks.table import Sample

Metric = Callable[[str, Sample], float]
"""A function of the model's answer and the sample, giving a number in [0, 1]."""


def contains_all(prediction: str, sample: Sample) -> float:
    """The share of the reference answers that stand in the prediction, whatever the case (RULER's `string_match_all`)."""
    return sum(answer.lower() in prediction.lower() for answer in sample.answer) / len(sample.answer)


def contains_part(prediction: str, sample: Sample) -> float:
    """1 where any of the reference answers stands in the prediction, whatever the case (RULER's `string_match_part`)."""
    return float(any(answer.lower() in prediction.lower() for answer in sample.answer))


def exact(prediction: str, sample: Sample) -> float:
    """1 where the prediction is one of the reference answers, but for case, punctuation, articles and spaces."""
    return float(any(_normalised(prediction) == _normalised(answer) for answer in sample.answer))


def f1(prediction: str, sample: Sample) -> float:
    """F1 of the words, normalised as for `exact`; of the best reference answer (SQuAD's and LongBench's)."""
    return max(_f1(_normalised(prediction).split(), _normalised(answer).split()) for answer in sample.answer)


def rouge_l(prediction: str, sample: Sample) -> float:
    """ROUGE-L F1 by the library `rouge`, which LongBench scores with; of the best reference answer."""
    from rouge import Rouge

    if not any(part.split() for part in prediction.split(".")):  # the library refuses a text without a word
        return 0.0
    best = 0.0
    for answer in sample.answer:
        if any(part.split() for part in answer.split(".")):
            try:
                found = Rouge(metrics=["rouge-l"]).get_scores(prediction, answer)[0]["rouge-l"]
            except RecursionError:  # of long texts without a full stop; LongBench counts 0 there
                continue
            best = max(best, _harmonic(found["p"], found["r"]))  # its own f adds 1e-8 below the line
    return best


def classification(prediction: str, sample: Sample) -> float:
    """1 over the number of labels that the prediction names, where the right one is among them (LongBench's `classification_score`).

    A label that is a part of the right one is not counted.
    """
    if not sample.classes:
        raise InputError(f"{sample.task}, row {sample.number}: classification needs the labels, in the column all_classes")
    named = [label for label in sample.classes if label in prediction]
    best = 0.0
    for answer in sample.answer:
        meant = [label for label in named if label == answer or label not in answer]
        if answer in meant:
            best = max(best, 1 / len(meant))
    return best


def edit_similarity(prediction: str, sample: Sample) -> float:
    """Edit similarity of the first line that is no comment, in whole per cent (LongBench's `code_sim_score`, by rapidfuzz)."""
    from rapidfuzz import fuzz

    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return max(round(fuzz.ratio(line, answer)) / 100 for answer in sample.answer)


def retrieval(prediction: str, sample: Sample) -> float:
    """Of the numbers in the prediction, the share that is the paragraph's of the reference ("Paragraph 7"; LongBench's)."""
    best = 0.0
    for answer in sample.answer:
        found = re.search(r"\d+", answer)
        best = max(best, _share(prediction, "" if found is None else found.group()))
    return best


def count(prediction: str, sample: Sample) -> float:
    """Of the numbers in the prediction, the share that is the reference (LongBench's `count_score`)."""
    return max(_share(prediction, answer.strip()) for answer in sample.answer)


METRICS: dict[str, Metric] = {
    "all": contains_all,
    "part": contains_part,
    "exact": exact,
    "f1": f1,
    "rouge-l": rouge_l,
    "classification": classification,
    "edit": edit_similarity,
    "retrieval": retrieval,
    "count": count,
}
"""By name. `forced` is told by the tokens, not by the answer's text, and has no function."""
FORCED = "forced"
"""The metric of tasks whose answer is not generated: how often the reference answer's next token is the likeliest one."""


def metric(name: str) -> Metric:
    """The metric of that name.

    Raises:
        InputError: there is none.
    """
    if name not in METRICS:
        raise InputError(f"no metric is called {name!r}; there are {', '.join(METRICS)}")
    return METRICS[name]


def _normalised(text: str) -> str:
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _f1(prediction: list[str], answer: list[str]) -> float:
    if not answer and not prediction:  # an answer of punctuation and articles alone
        return 0.0
    same = sum((Counter(prediction) & Counter(answer)).values())
    return _harmonic(same / max(len(prediction), 1), same / max(len(answer), 1))


def _harmonic(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _share(prediction: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0
