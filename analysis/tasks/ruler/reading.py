"""RULER's `qa_1` and `qa_2`: a question of a reading data set, its documents hidden among those of other questions."""

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.errors import InputError
from analysis.tasks.asked import Asked
from analysis.tasks.data import read
from analysis.tasks.fitting import Build, Draft

HUB = {"qa_1": "rajpurkar/squad_v2@validation", "qa_2": "hotpotqa/hotpot_qa:distractor@validation"}
"""What RULER reads."""
MAX_NEW_TOKENS = 32
ONLY = "Answer the question from the documents below. Give the answer alone, without any other word."


@dataclass(frozen=True)
class Question:
    """A question, its answers, and the documents that they stand in, by their place in `Reading.documents`."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    article: str = ""


@dataclass(frozen=True)
class Reading:
    """A reading data set: its documents, the article that each is of ("" where none is named), and its questions."""

    documents: tuple[str, ...]
    articles: tuple[str, ...]
    questions: tuple[Question, ...]


@functools.lru_cache(maxsize=4)
def reading(name: str, task: str) -> Reading:
    """The questions of a data set in the form of SQuAD (`context`, `question`, `answers`) or of HotpotQA (`context` of titles and sentences,
    `question`, `answer`).

    Questions without an answer, and those whose answer stands in none of their documents ("yes", "no"), are left out.

    Raises:
        InputError: it cannot be read, has another form, or nothing is left.
    """
    frame = read(name)
    answers = next((column for column in ("answers", "answer") if column in frame.columns), None)
    if answers is None or not {"context", "question"} <= set(frame.columns):
        raise InputError(
            f"{name} is no reading data set: it has the columns {', '.join(frame.columns)}, and needed are context, question, and answers (as "
            "SQuAD) or answer (as HotpotQA)"
        )
    form = str if task == "qa_1" else Mapping
    if not isinstance(frame["context"].iloc[0], form):
        raise InputError(
            f"{name} is no data set for {task}, whose contexts are {'texts' if form is str else 'titles with sentences'}"
        )
    places: dict[str, int] = {}
    articles: list[str] = []
    questions = []
    for row in frame.to_dict("records"):
        article = str(row.get("title") or "")
        own = [places.setdefault(text, len(places)) for text in _documents(row["context"], name)]
        articles += [article] * (len(places) - len(articles))
        texts = list(places)
        said = tuple(dict.fromkeys(answer for answer in _answers(row[answers]) if answer.strip()))
        if said and any(answer.lower() in texts[place].lower() for answer in said for place in own):
            questions.append(Question(str(row["question"]), said, tuple(own), article))
    if not questions:
        raise InputError(f"{name} has no question whose answer stands in its documents")
    return Reading(tuple(places), tuple(articles), tuple(questions))


def _documents(context: Any, name: str) -> list[str]:
    if isinstance(context, str):
        return [context]
    if isinstance(context, Mapping) and {"title", "sentences"} <= context.keys():
        return [f"{title}\n{''.join(lines)}" for title, lines in zip(context["title"], context["sentences"], strict=True)]
    raise InputError(f"{name}: a context must be text, or titles with sentences; not {type(context).__name__}")


def _answers(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        value = value.get("text", [])
    if isinstance(value, str):
        return [value]
    return [str(part) for part in value] if value is not None and not isinstance(value, float) else []


def answering(task: str, asked: Asked, random_: random.Random, number: int) -> tuple[Build, int]:
    """One question, each once before one comes again; units are documents, the question's own among others, first of the same article.

    Raises:
        InputError: no data set is named, or it has too few documents.
    """
    if asked.data is None:
        raise InputError(
            f"{task} reads a data set, which is not made here: name one, such as --data {HUB[task]}, or a file in that form"
        )
    found = reading(asked.data, task)
    turns = list(range(len(found.questions)))
    random.Random(f"{task} {asked.seed}").shuffle(turns)  # noqa: S311
    question = found.questions[turns[number % len(turns)]]
    own = set(question.documents)
    others = [place for place in range(len(found.documents)) if place not in own]
    random_.shuffle(others)
    others.sort(key=lambda place: not question.article or found.articles[place] != question.article)
    order = random_.getrandbits(64)

    def build(units: int, words: int) -> Draft:
        chosen = [*question.documents, *others[: max(units - len(own), 0)]]
        texts = [found.documents[place] for place in chosen]
        random.Random(order).shuffle(texts)  # noqa: S311
        if words:
            spare = [word for place in others[::-1] for word in found.documents[place].split()]
            texts.append(" ".join(spare[:words]))
        listed = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(texts, 1))
        return Draft(f"{ONLY}\n\n{listed}\n\n{ONLY}\n\n", f"Question: {question.text}", " Answer:", question.answers)

    return build, len(own)
