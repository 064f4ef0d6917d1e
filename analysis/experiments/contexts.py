"""Texts to measure on: the user's files, or passages of the documentation that comes with Python."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from analysis.errors import InputError
from analysis.settings import ValidationSettings
from analysis.texts import read_text
from eviction.allocate import require_room
from eviction.errors import BudgetError


@dataclass(frozen=True)
class Text:
    """A named text, before it is tokenised."""

    name: str
    content: str


@dataclass(frozen=True)
class Context:
    """A named prompt: token ids [1, tokens]."""

    name: str
    tokens: Tensor


def texts(settings: ValidationSettings) -> list[Text]:
    """The texts that the settings ask for, read and checked, none tokenised yet.

    Raises:
        InputError: a file is missing, a folder, not UTF-8 text, or two files share a name that cannot tell them apart.
    """
    if not settings.context_files:
        return _passages(settings)
    names = [path.name for path in settings.context_files]
    chosen = names if len(set(names)) == len(names) else [str(path) for path in settings.context_files]
    if len(set(chosen)) < len(chosen):
        raise InputError("--context names the same file twice")
    return [Text(name, read_text("--context", path)) for name, path in zip(chosen, settings.context_files, strict=True)]


def tokenised(text: Text, tokenizer: Any, settings: ValidationSettings, limit: int | None) -> Context:
    """The longest context of `at_every_length`."""
    return at_every_length(text, tokenizer, settings, limit)[-1]


def at_every_length(text: Text, tokenizer: Any, settings: ValidationSettings, limit: int | None) -> list[Context]:
    """The start of `text` at each length that the settings name, in ascending order; lengths that it does not have are left out.

    Where they name none: its first `context_length` tokens, fewer where it has fewer.

    Raises:
        InputError: the tokens do not hold the window and the smallest budget, are more than the model's `limit`, or are fewer than the
            smallest length.
    """
    longest = max(settings.every_length)
    tokens = torch.as_tensor(tokenizer(text.content, return_tensors="pt", add_special_tokens=True).input_ids[:, :longest])
    have = tokens.shape[1]
    if not settings.lengths:
        return [_checked(Context(text.name, tokens), settings, limit)]
    lengths = [length for length in sorted(settings.lengths) if length <= have]
    if not lengths:
        raise InputError(f"{text.name} has {have} tokens, fewer than the {min(settings.lengths)} of the shortest context")
    return [_checked(Context(f"{text.name} ({length} tokens)", tokens[:, :length]), settings, limit) for length in lengths]


def _checked(context: Context, settings: ValidationSettings, limit: int | None) -> Context:
    count = context.tokens.shape[1]
    if count <= settings.window:
        raise InputError(
            f"{context.name} has {count} tokens, which is no more than the window of {settings.window}: give a longer text "
            "or a smaller --window"
        )
    if limit is not None and count + settings.later + 1 > limit:
        raise InputError(
            f"{context.name}: {count} tokens and the {settings.later + 1} that follow exceed the {limit} positions of the "
            f"model; lower --context-length or --later, so that they add up to less than {limit}"
        )
    for budget in settings.budgets:
        try:
            require_room(budget, count, settings.window)
        except BudgetError as error:
            raise InputError(f"{context.name}: {error}") from error
    return context


def _passages(settings: ValidationSettings) -> list[Text]:
    """Passages of Python's own documentation, disjoint as far as there is text, chosen by the seed.

    The topics are shuffled and dealt out in equal numbers, so each passage is a run of whole topics. About four characters
    make a token; where topics run out, a passage goes on with the next one's.
    """
    from pydoc_data.topics import topics

    order = sorted(topics)
    if settings.passages > len(order):
        raise InputError(f"--passages is at most {len(order)}, the topics of Python's documentation; not {settings.passages}")
    random.Random(settings.seed).shuffle(order)  # noqa: S311
    wanted = 8 * max(settings.every_length)  # characters; cut to tokens later
    passages = []
    for number in range(settings.passages):
        start = number * len(order) // settings.passages
        names: list[str] = []
        parts: list[str] = []
        for name in order[start:] + order[:start]:
            if sum(map(len, parts)) >= wanted:
                break
            names.append(name)
            parts.append(topics[name].strip())
        passages.append(Text(f"pydoc:{names[0]}", "\n\n".join(parts)))
    return passages
