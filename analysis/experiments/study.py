"""A grid turned into cells, each with an id of its own, and the cells of a context computed together on one prefill."""

import hashlib
import importlib.metadata
import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from analysis.errors import InputError, first_line
from analysis.experiments.answering import FULL, Answering
from analysis.experiments.judging import Choice as Cell
from analysis.experiments.prompts import Prompt, by_context, prompt, require_room
from analysis.grid import Grid, split_policy
from analysis.tasks import Asked, make, metric, names, ruling, task
from analysis.tasks.haystack import documentation, words_of
from analysis.tasks.metrics import FORCED
from analysis.texts import read_text
from eviction import HeadScores, Policy, policy
from hooks.reference import LoadedModel

VERSIONS = ("criticalkv", "torch", "transformers", "tokenizers", "numpy", "rouge", "rapidfuzz", "wonderwords")
ROOMS = ("hooks", "perturbation", "bounds", "eviction", "analysis/experiments", "analysis/tasks")
"""Folders whose code decides what a cell's numbers are."""
ID = 24
WHERE = ("model", "source", "length", "seed", "sample", "question")
"""The columns that tell prompts apart."""


@dataclass(frozen=True)
class Planned:
    """A cell that is to be computed: its id, which prompt of its group it is of, and what chooses."""

    id: str
    prompt: int
    cell: Cell


@dataclass(frozen=True)
class Group:
    """The unit of work: a context's prompts and all their cells. `keys` are the columns that each prompt's rows begin with."""

    model: str
    name: str
    prompts: tuple[Prompt, ...]
    keys: tuple[Mapping[str, Any], ...]
    cells: tuple[Planned, ...]


def policies(grid: Grid) -> dict[str, Policy]:
    """The grid's policies by the text that names them; `scores` may name a file of head scores.

    Raises:
        InputError: no policy has a name, or such a parameter.
    """
    found = {}
    for text in grid.policies:
        name, settings = split_policy(text)
        try:
            found[text] = composed(name, settings)
        except (ValueError, TypeError, OSError) as error:
            raise InputError(f"--policies {text}: {error}") from error
    return found


def composed(name: str, settings: Mapping[str, Any]) -> Policy:
    """A policy as users write it: `scores` may name a file of head scores.

    Raises:
        ValueError, TypeError, OSError: no policy has that name or such a parameter, or the file cannot be read.
    """
    if isinstance(settings.get("scores"), str):
        settings = {**settings, "scores": HeadScores.load(settings["scores"]).scores}
    return policy(name, **settings)


def check(grid: Grid) -> None:
    """What can be said of a grid before a model is there.

    Raises:
        InputError: a policy, a task, a metric or a file is not there, or a task's table has not the form.
    """
    policies(grid)
    if grid.metric is not None:
        metric(grid.metric)
    _haystack(grid)
    for name in names(grid.tasks):
        if not task(name).sized:
            make(name, Asked(grid.samples, grid.lengths[0], len, data=grid.data))


def plan(grid: Grid, model: str, tokenizer: Any, limit: int | None) -> list[Group]:
    """The groups of one model, in order: tasks, lengths, seeds, samples; of each prompt the full cache first.

    Args:
        grid: what is asked for.
        model: its name.
        tokenizer: the model's.
        limit: the model's positions, or None.

    Raises:
        InputError: a task cannot be made, or a prompt and its answer are longer than the model's positions.
    """
    rules = {FULL[0]: "full", **{name: _policy(one) for name, one in policies(grid).items()}}
    chosen = [FULL, *((name, budget) for name in grid.policies for budget in grid.budgets)]
    hay, held = _haystack(grid), weights(model)
    groups = []
    for name in names(grid.tasks):
        sized = task(name).sized
        for length in grid.lengths if sized else grid.lengths[:1]:
            for seed in grid.seeds if sized else grid.seeds[:1]:  # of a table a seed draws the same rows again
                drawn = _drawn(grid, name, length, seed, tokenizer, hay)
                require_room(drawn, limit, model)
                origin = {"model": model, "source": name, "length": length if sized else 0, "seed": seed}
                for prompts in by_context(drawn):
                    keys = [{**origin, **_keys(grid, one)} for one in prompts]
                    cells = [
                        Planned(_id(grid, [*known, held], digest, cell, rules[cell[0]]), place, cell)
                        for place, (known, digest) in enumerate(
                            ([one[column] for column in WHERE], _digest(prompt))
                            for one, prompt in zip(keys, prompts, strict=True)
                        )
                        for cell in chosen
                    ]
                    title = f"{name}, {prompts[0].length} tokens, sample {prompts[0].sample.number}"
                    groups.append(Group(model, title, tuple(prompts), tuple(keys), tuple(cells)))
    found = [(*group.keys[one.prompt].items(), one.cell) for group in groups for one in group.cells]
    if len(set(found)) < len(found):
        raise InputError(
            f"{len(found) - len(set(found))} cells of the grid have the same name as another; ask for each task once"
        )
    return groups


def compute(
    loaded: LoadedModel, chosen: Mapping[str, Policy], judge: int, group: Group, wanted: Collection[str]
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """The rows of a group's wanted cells, or why there is none; a cell's row does not depend on which others are wanted.

    A cell that fails is tried once more. `chosen` are all of the grid's policies, whatever is wanted.
    """
    cells = [one for one in group.cells if one.id in wanted]
    if not cells:
        return
    try:
        answering = Answering(
            loaded,
            group.prompts[cells[0].prompt].context,
            chosen,
            list(dict.fromkeys(one.cell for one in cells)),
            judge=judge,
        )
    except Exception as error:
        for one in cells:
            yield one.id, told(error)
        return
    for one in cells:
        prompt, keys = group.prompts[one.prompt], group.keys[one.prompt]
        found: dict[str, Any] | str
        for _ in range(2):
            try:
                found = {
                    **keys,
                    "policy": one.cell[0],
                    "budget": float(one.cell[1]),
                    **answering.row(prompt, one.cell),
                }
                break
            except Exception as error:
                found = told(error)
        yield one.id, found


def told(error: Exception) -> str:
    """An error in a line."""
    kind = type(error).__name__
    first = first_line(error)
    return kind if first == kind else f"{kind}: {first}"


def _drawn(grid: Grid, name: str, length: int, seed: int, tokenizer: Any, haystack: tuple[str, ...]) -> list[Prompt]:
    """The prompts of a task."""

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    asked = Asked(grid.samples, length, count, seed, haystack, grid.depths, grid.data)
    found = []
    for sample in make(name, asked):
        ruler = ruling(sample, name)
        rule = grid.metric or ruler.metric
        if grid.max_new_tokens is not None:
            sample = replace(sample, max_new_tokens=grid.max_new_tokens)
        found.append(prompt(tokenizer, sample, rule, aware=grid.aware, raw=grid.raw or ruler.raw, forced=rule == FORCED))
    return found


def _keys(grid: Grid, one: Prompt) -> dict[str, Any]:
    sample = one.sample
    return {
        "task": sample.task,
        "sample": sample.number,
        "question": "seen" if grid.aware else "unseen",
        "depth": sample.depth,
        "answer": "\n".join(sample.answer),
    }


def _digest(one: Prompt) -> str:
    """Of the tokens that the model is given, and of all that scores its answer."""
    tokens = [None if part is None else part.tolist() for part in (one.context, one.opening, one.truth)]
    sample = one.sample
    parts = [tokens, sample.answer, sample.classes, sample.max_new_tokens, source(one.metric)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def source(thing: Any) -> str:
    """What a function of a user's says, with what it has at hand; of anything else how it is written."""
    if not inspect.isfunction(thing):
        return repr(thing)
    text = f"{thing.__code__.co_code.hex()} {thing.__code__.co_consts}"
    with suppress(OSError, TypeError):  # the names that it uses, too, where its file is there
        text += inspect.getsource(thing)
    held = [repr(cell.cell_contents) for cell in thing.__closure__ or ()]
    return f"{thing.__module__}.{thing.__qualname__} {text} {held} {thing.__defaults__}"


def _policy(chosen: Policy) -> str:
    """A policy as ids have it: its settings; of a function of the user's its source, since where it lies in memory says nothing."""
    function = getattr(chosen.accumulate, "function", None)
    return f"{source(function)} {chosen if function is None else chosen.name}"


def weights(model: str) -> str:
    """What tells a model folder's weights from others: names, sizes and times of its files; nothing of a model on the hub."""
    folder = Path(model)
    if not folder.is_dir():
        return ""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".json", ".gguf"))
    return repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


def _id(grid: Grid, where: Sequence[Any], digest: str, cell: Cell, rule: str) -> str:
    settings = [grid.judge, grid.device, grid.device_map, grid.dtype, cell[0], cell[1], rule]
    return hashlib.sha256(json.dumps([where, digest, settings, code()]).encode()).hexdigest()[:ID]


@cache
def code() -> str:
    """A digest of the code that decides what a cell's numbers are: the rooms' sources, and the versions of what they stand on."""
    root = Path(__file__).parents[2]
    found = hashlib.sha256(json.dumps([importlib.metadata.version(name) for name in VERSIONS]).encode())
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            found.update(path.relative_to(root).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def _haystack(grid: Grid) -> tuple[str, ...]:
    if grid.haystack is None:
        return documentation()
    return words_of(read_text("--haystack", grid.haystack))
