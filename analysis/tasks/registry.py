"""Tasks by name: RULER's, LongBench's, a needle over length and depth, language modelling, a user's own function, or a table somewhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from analysis.errors import InputError
from analysis.grid import nearest
from analysis.tasks import fidelity, longbench, needle
from analysis.tasks.asked import Asked
from analysis.tasks.data import drawn, is_file, read
from analysis.tasks.fitting import Build, fitted
from analysis.tasks.metrics import FORCED, METRICS, Metric
from analysis.tasks.ruler import counting, niah, reading, tracking
from analysis.tasks.table import Sample, samples

Function = Callable[[Asked], pd.DataFrame]


@dataclass(frozen=True)
class Task:
    """What makes a table, and how its answers are scored.

    Attributes:
        name: as rows and tables call it.
        make: of what is asked, a table in the form of `COLUMNS`.
        metric: a name in `METRICS`, `FORCED`, or a function.
        raw: whether the text is given as it is, never in a chat template.
        source: where it comes from.
        sized: whether its samples are as long as is asked; others are as long as they are.
    """

    name: str
    make: Function
    metric: str | Metric
    raw: bool = False
    source: str = ""
    sized: bool = True


TOLERANCE = 0.02
"""The share of the tokens asked for that a sample may lack."""
WORD = 16
"""Tokens that one word may have, by which a short sample may lack more."""


def _generated(name: str, maker: Callable[[Asked, int], tuple[Build, int]], max_new_tokens: int) -> Function:
    def make(asked: Asked) -> pd.DataFrame:
        rows = []
        for number in range(asked.samples):
            build, least = maker(asked, number)
            draft = fitted(build, asked.length, asked.count, least)
            if asked.length - (held := asked.count(draft.text)) > max(TOLERANCE * asked.length, WORD):
                raise InputError(
                    f"{name}: the data are enough for {held} of {asked.length} tokens; give more of them, or a smaller length"
                )
            rows.append(
                {
                    "context": draft.context,
                    "question": draft.question,
                    "answer_prefix": draft.answer_prefix,
                    "answer": list(draft.answer),
                    "task": name,
                    "max_new_tokens": max_new_tokens,
                    "depth": draft.depth,
                    "asked_length": asked.length,
                }
            )
        return pd.DataFrame(rows)

    return make


def _ruler() -> dict[str, Task]:
    """RULER's thirteen (arXiv 2404.06654)."""

    def plain(name: str, maker: Callable[..., tuple[Build, int]]) -> Callable[[Asked, int], tuple[Build, int]]:
        return lambda asked, number: maker(asked, asked.random(name, number))

    source = "RULER, arXiv 2404.06654"
    made = {
        name: Task(name, _generated(name, plain(name, niah.builder(kind)), niah.MAX_NEW_TOKENS), "all", source=source)
        for name, kind in niah.KINDS.items()
    }
    made["vt"] = Task("vt", _generated("vt", plain("vt", tracking.tracking), tracking.MAX_NEW_TOKENS), "all", source=source)
    for name, counted in (("cwe", counting.common_words), ("fwe", counting.frequent_words)):
        made[name] = Task(name, _generated(name, plain(name, counted), counting.MAX_NEW_TOKENS[name]), "all", source=source)
    for name in reading.HUB:
        make = _generated(name, _asking(name), reading.MAX_NEW_TOKENS)
        made[name] = Task(name, make, "part", source=source)
    return made


def _asking(name: str) -> Callable[[Asked, int], tuple[Build, int]]:
    return lambda asked, number: reading.answering(name, asked, asked.random(name, number), number)


RULER: dict[str, Task] = _ruler()
LONGBENCH: dict[str, Task] = {
    name: Task(
        name,
        partial(longbench.table, name),
        kind.metric,
        raw=kind.raw,
        source="LongBench, arXiv 2308.14508",
        sized=False,
    )
    for name, kind in longbench.KINDS.items()
}
OURS: dict[str, Task] = {
    "needle": Task(
        "needle",
        _generated(
            "needle", lambda asked, number: needle.needle(asked, asked.random("needle", number), number), needle.MAX_NEW_TOKENS
        ),
        "all",
        source="a needle in a haystack, over length and depth",
    ),
    "fidelity": Task(
        "fidelity",
        _generated(
            "fidelity",
            lambda asked, number: fidelity.fidelity(asked, asked.random("fidelity", number)),
            fidelity.MAX_NEW_TOKENS,
        ),
        FORCED,
        raw=True,
        source="the words that follow in real text",
    ),
}
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": tuple(RULER),
    "ruler-offline": tuple(name for name in RULER if name not in reading.HUB),
    "longbench": tuple(LONGBENCH),
}
"""Names that stand for several."""
_own: dict[str, Task] = {}


def register(name: str, *, metric: str | Metric = "part", raw: bool = False) -> Callable[[Function], Function]:
    """Decorator: make a function of an `Asked` a task under `name`; it returns a table in the form of `COLUMNS`.

    Examples:
        >>> @register("capitals", metric="exact")
        ... def capitals(asked):
        ...     return pd.DataFrame({"context": ["Paris is the capital of France."], "question": ["What is the capital of France?"],
        ...         "answer_prefix": [""], "answer": ["Paris"], "task": "capitals", "max_new_tokens": 4})
        >>> task("capitals").metric
        'exact'
        >>> unregister("capitals")

    Raises:
        InputError: the name is taken, or no metric has that name.
    """
    if name in known() or name in GROUPS or not name.strip() or "," in name:
        raise InputError(f"{name!r} cannot be registered: it is taken, empty, or holds a comma, which stands between tasks")
    if isinstance(metric, str) and metric not in (*METRICS, FORCED):
        raise InputError(f"no metric is called {metric!r}; there are {', '.join([*METRICS, FORCED])}")

    def keep(function: Function) -> Function:
        _own[name] = Task(name, function, metric, raw, "a function of yours")
        return function

    return keep


def unregister(name: str) -> None:
    """Take a registered task back; of ours none can be."""
    del _own[name]


def known() -> dict[str, Task]:
    """Every task by name."""
    return {**RULER, **LONGBENCH, **OURS, **_own}


def names(asked: Sequence[str]) -> list[str]:
    """Names with groups spelt out, each once.

    Raises:
        InputError: no task has a name, and it is no file and no data set; near ones are suggested.
    """
    found: dict[str, None] = {}
    for name in asked:
        for one in GROUPS.get(name, (name,)):
            task(one)
            found[one] = None
    return list(found)


def task(name: str) -> Task:
    """The task of that name; a file or a data set on the hub (`owner/name:config@split`) is one too.

    Rows of a table are scored by the task that they name, whatever it is called here; those that name none of ours by `part`.

    Raises:
        InputError: no task has that name, and it is no file and no data set; near ones are suggested.
    """
    every = known()
    if name in every:
        return every[name]
    if is_file(name) or "/" in name:
        return Task(name, partial(_read, name), "part", source="a table", sized=False)
    raise InputError(
        f"no task is called {name!r}; {nearest(name, (*every, *GROUPS))} A file of rows or a data set (owner/name) is a task too"
    )


def make(name: str, asked: Asked) -> list[Sample]:
    """The samples of a task, checked.

    Raises:
        InputError: the task is not known, its data cannot be read, its table has not the form, or the length is too short for it.
    """
    chosen = task(name)
    try:
        table = chosen.make(asked)
    except InputError:
        raise
    except Exception as error:
        if name not in _own:
            raise
        raise InputError(f"the task {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(table, pd.DataFrame):
        raise InputError(f"the task {name} must return a DataFrame, not {type(table).__name__}")
    return samples(table, name)


def _read(name: str, asked: Asked) -> pd.DataFrame:
    return drawn(longbench.tabled(read(name)), asked.samples, asked.seed)


def ruling(sample: Sample, asked: str) -> Task:
    """The task by whose metric a sample's answer is scored: that which its row names, or else that which was asked for.

    Raises:
        InputError: neither is known.
    """
    return known().get(sample.task) or task(asked)
