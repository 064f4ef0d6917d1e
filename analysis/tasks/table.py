"""The table form of a task: a row per question about a context, with the columns that the community's evaluations share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.errors import InputError

COLUMNS: dict[str, str] = {
    "context": "the long text; what a policy evicts from",
    "question": "what is asked about it; empty where nothing is",
    "answer_prefix": "how the answer begins, in the model's mouth; may be empty",
    "answer": "the reference answers: a list of texts, or one text",
    "task": "the task's name, which decides how an answer is scored",
    "max_new_tokens": "tokens of an answer, at most",
}
"""The columns that a task's table must have. `answers` (LongBench's name) is read as `answer`."""
OPTIONAL: dict[str, str] = {
    "all_classes": "the labels among which an answer is one, for the score `classification`",
    "depth": "where in the context the answer stands: 0 at its start, 1 at its end",
    "asked_length": "the tokens that were asked for, of tasks that are made here",
}
"""Columns that are used where they are there; others are left alone."""


@dataclass(frozen=True)
class Sample:
    """A row of a task's table, checked. `number` is its place in the table."""

    task: str
    number: int
    context: str
    question: str
    answer_prefix: str
    answer: tuple[str, ...]
    max_new_tokens: int
    classes: tuple[str, ...] = ()
    depth: float | None = None
    length: int | None = None

    @property
    def text(self) -> str:
        """What the model is given, without its chat template."""
        return self.context + self.question + self.answer_prefix


def samples(frame: pd.DataFrame, where: str = "the table") -> list[Sample]:
    """The rows of a table in the form of `COLUMNS`.

    Args:
        frame: the table.
        where: what a message calls it.

    Raises:
        InputError: a column is missing, there is no row, or a row's context or answers are empty, its texts no texts, or its
            `max_new_tokens` no whole number above 0.
    """
    if "answer" not in frame.columns and "answers" in frame.columns:
        frame = frame.rename(columns={"answers": "answer"})
    if missing := [name for name in COLUMNS if name not in frame.columns]:
        raise InputError(
            f"{where} has no column {', '.join(missing)}; a task needs {', '.join(COLUMNS)}, and it has "
            f"{', '.join(map(str, frame.columns)) or 'none'}"
        )
    if frame.empty:
        raise InputError(f"{where} has no row")
    if not pd.api.types.is_integer_dtype(frame.index) or frame.index.has_duplicates:
        frame = frame.reset_index(drop=True)
    return [_sample(int(number), row, where) for number, row in zip(frame.index, frame.to_dict("records"), strict=True)]


def _sample(number: int, row: Mapping[Any, Any], where: str) -> Sample:
    at = f"{where}, row {number}"
    for name in ("context", "question", "answer_prefix", "task"):
        value = row[name]
        missing = value is None or value is pd.NA or (isinstance(value, float) and value != value)
        if name in ("question", "answer_prefix") and missing:
            value = row[name] = ""  # type: ignore[index]
        if not isinstance(value, str):
            raise InputError(f"{at}: {name} must be text, not {value!r} ({type(value).__name__})")
        if not value.strip() and name in ("context", "task"):
            raise InputError(f"{at}: {name} is empty")
    answer = texts(row["answer"])
    if not answer or not all(part.strip() for part in answer):
        raise InputError(f"{at}: answer must be a text or a list of texts, none of them empty; not {row['answer']!r}")
    count = row["max_new_tokens"]
    numeric = isinstance(count, int | float | np.number) and not isinstance(count, bool | np.bool_)
    if not numeric or not float(count).is_integer() or count < 1:
        raise InputError(f"{at}: max_new_tokens must be a whole number of at least 1, not {count!r}")
    depth, length = _number(row.get("depth")), _number(row.get("asked_length"))
    return Sample(
        task=row["task"],
        number=number,
        context=row["context"],
        question=row["question"],
        answer_prefix=row["answer_prefix"],
        answer=tuple(answer),
        max_new_tokens=int(count),
        classes=tuple(texts(row.get("all_classes")) or ()),
        depth=depth,
        length=None if length is None else int(length),
    )


def texts(value: Any) -> list[str] | None:
    """A text, or a list of texts, numbers taken as text, as a list; None where it is neither."""
    if isinstance(value, str) or _number(value) is not None:  # what stands in a CSV file as 417 is read as a number
        return [str(value)]
    if isinstance(value, list | tuple | np.ndarray):
        parts = list(value)
        if all(isinstance(part, str | int | float | np.number) and not isinstance(part, bool) for part in parts):
            return [str(part) for part in parts]
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, int | float | np.number) and not isinstance(value, bool) and value == value:
        return float(value)
    return None
