"""What a needle is hidden in: sentences that repeat and say nothing, or real text."""

import functools
import itertools
import re
from collections.abc import Sequence

from analysis.errors import InputError

NOISE = ("The rain has stopped.", "The road is wet.", "The night is calm.", "We walk on.", "Out and home again.")
"""Sentences that repeat."""


def noise(count: int) -> list[str]:
    """So many sentences that repeat."""
    return list(itertools.islice(itertools.cycle(NOISE), count))


def noise_words(count: int) -> str:
    """So many words of the sentences that repeat."""
    return " ".join(itertools.islice(itertools.cycle(" ".join(NOISE).split()), count))


@functools.cache
def documentation() -> tuple[str, ...]:
    """Words of the documentation that comes with Python, each paragraph once."""
    from pydoc_data.topics import topics

    paragraphs = {" ".join(part.split()): None for name in sorted(topics) for part in topics[name].split("\n\n")}
    return tuple(" ".join(paragraphs).split())


def words_of(text: str) -> tuple[str, ...]:
    """The words of a user's text.

    Raises:
        InputError: there are fewer than 100.
    """
    words = tuple(text.split())
    if len(words) < 100:
        raise InputError(f"a haystack of {len(words)} words is too short: give a text of at least 100")
    return words


def run(words: Sequence[str], start: int, count: int) -> str:
    """`count` words from place `start` on, from the beginning again where they end."""
    start %= len(words)
    return " ".join(itertools.islice(itertools.cycle(itertools.chain(words[start:], words[:start])), count))


def sentences(text: str) -> list[str]:
    """The text in sentences."""
    return [part for part in re.split(r"(?<=[.!?])\s+", text) if part]
