"""LongBench's sixteen English tasks (arXiv 2308.14508): how each is scored, and its own rows made into the table form."""

from dataclasses import dataclass

import pandas as pd

from analysis.errors import InputError
from analysis.tasks.asked import Asked
from analysis.tasks.data import drawn, read
from analysis.tasks.metrics import METRICS, Metric
from analysis.tasks.table import Sample, texts

HUB = "Xnhyacinth/LongBench"
"""LongBench in the table form, a configuration for each task."""


def first_line(name: str) -> Metric:
    """A metric of the prediction's first line: few-shot tasks go on with examples of their own, which LongBench cuts."""

    def scored(prediction: str, sample: Sample) -> float:
        return METRICS[name](prediction.lstrip("\n").split("\n")[0], sample)

    return scored


@dataclass(frozen=True)
class Kind:
    """A task: its metric, what stands before the context (with `{context}`), the question (with `{input}`) and how the answer begins.

    `raw` ones are given without a chat template, as LongBench does with few-shot and code tasks.
    """

    metric: str | Metric
    max_new_tokens: int
    context: str
    question: str = "Question: {input}\n"
    answer_prefix: str = "Answer:"
    raw: bool = False


_BRIEF = "Give the answer alone, as briefly as you can, and no other word."
_PASSAGES = Kind("f1", 32, f"Answer the question from these passages. {_BRIEF}\n\n{{context}}\n\n{_BRIEF}\n\n")
_CODE = Kind("edit", 64, "Complete the code below.\n{context}", "{input}", "Next line of code:\n", raw=True)
KINDS: dict[str, Kind] = {
    "narrativeqa": Kind(
        "f1", 128, f"Below is a story or a film script, and a question. {_BRIEF}\n\n{{context}}\n\n{_BRIEF}\n\n"
    ),
    "qasper": Kind(
        "f1",
        128,
        'Below is a scientific article, and a question. Answer in a phrase or a sentence; "unanswerable" where the article does not say, '
        '"yes" or "no" where that is asked.\n\n{context}\n\n',
    ),
    "multifieldqa_en": Kind("f1", 64, f"Read the text below, and answer the question. {_BRIEF}\n\n{{context}}\n\n{_BRIEF}\n\n"),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "gov_report": Kind(
        "rouge-l", 512, "Below is a government report.\n\n{context}\n\n", "Summarise the report on one page.\n\n", "Summary:"
    ),
    "qmsum": Kind(
        "rouge-l",
        512,
        "Below is the transcript of a meeting, and a request. Answer it in a few sentences.\n\n{context}\n\n",
        "Query: {input}\n",
    ),
    "multi_news": Kind(
        "rouge-l", 512, "Below are several news texts.\n\n{context}\n\n", "Summarise all of them on one page.\n\n", "Summary:"
    ),
    "trec": Kind(
        first_line("classification"),
        64,
        "Say of what type a question is. Some examples:\n\n{context}\n",
        "{input}",
        "Type:",
        raw=True,
    ),
    "triviaqa": Kind(
        first_line("f1"),
        32,
        f"Answer the question from the passage. {_BRIEF} Some examples:\n\n{{context}}\n\n",
        "{input}",
        raw=True,
    ),
    "samsum": Kind(
        first_line("rouge-l"),
        128,
        "Summarise a dialogue in a few short sentences. Some examples:\n\n{context}\n\n",
        "{input}",
        "Summary:",
        raw=True,
    ),
    "passage_count": Kind(
        "count",
        32,
        "Below are paragraphs, some of which stand there more than once.\n\n{context}\n\n",
        "How many different paragraphs are there? Give the number alone.\n\n",
        "The number is:",
    ),
    "passage_retrieval_en": Kind(
        "retrieval",
        32,
        "Below are 30 paragraphs, and a summary of one of them.\n\n{context}\n\nThe summary:\n\n",
        '{input}\n\nWhich paragraph is it of? Answer in the form "Paragraph 1".\n\n',
        "The answer is:",
    ),
    "lcc": _CODE,
    "repobench-p": _CODE,
}


def table(name: str, asked: Asked) -> pd.DataFrame:
    """Rows of a task, from the data set that the user names or from the hub.

    Raises:
        InputError: it cannot be read, or has no rows of that task.
    """
    where = asked.data or f"{HUB}:{name}@test"
    frame = read(where)
    column = next((column for column in ("task", "dataset") if column in frame.columns), None)
    if column is not None:
        frame = frame[frame[column] == name]
    if frame.empty:
        raise InputError(f"{where} has no row of the task {name}")
    return drawn(tabled(frame.reset_index(drop=True)), asked.samples, asked.seed)


def tabled(frame: pd.DataFrame) -> pd.DataFrame:
    """LongBench's own rows (`input`, `context`, `answers`, `dataset`) in the table form, in our wording; other tables as they are."""
    if not {"input", "context", "answers", "dataset"} <= set(frame.columns):
        return frame
    rows = []
    for number, row in enumerate(frame.to_dict("records")):
        answers = texts(row["answers"])
        if not isinstance(row["context"], str) or not isinstance(row["input"], str) or not answers:
            raise InputError(f"LongBench's row {number} has no context, no input or no answers")
        kind = KINDS.get(row["dataset"])
        if kind is None:
            raise InputError(f"LongBench's data set {row['dataset']!r} is none of the English tasks: {', '.join(KINDS)}")
        end = kind.answer_prefix.strip()
        rows.append(
            {
                **row,
                "context": kind.context.replace("{context}", row["context"]),
                "question": kind.question.replace("{input}", row["input"].removesuffix(end)),
                "answer_prefix": kind.answer_prefix,
                "answer": answers,
                "task": row["dataset"],
                "max_new_tokens": kind.max_new_tokens,
            }
        )
    return pd.DataFrame(rows, index=frame.index).drop(columns=["answers", "input"])
