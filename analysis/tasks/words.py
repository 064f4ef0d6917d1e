"""What needles are made of: words, numbers, identifiers, and lists of words."""

import functools
import random
import uuid
from typing import Literal

Kind = Literal["words", "numbers", "uuids"]


@functools.cache
def english(*categories: str) -> tuple[str, ...]:
    """The words of wonderwords of those categories ("noun", "adjective", "verb"), each once, in alphabetical order."""
    from wonderwords import RandomWord

    book = RandomWord()
    found = {word.strip() for category in categories for word in book.filter(include_categories=[category])}
    return tuple(sorted(word for word in found if word and " " not in word))


def drawn(kind: Kind, random_: random.Random) -> str:
    """A word (adjective-noun), a number of seven digits, or a version 4 UUID."""
    if kind == "words":
        return f"{random_.choice(english('adjective'))}-{random_.choice(english('noun'))}"
    if kind == "numbers":
        return str(random_.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=random_.getrandbits(128), version=4))


def different(kind: Kind, many: int, random_: random.Random) -> list[str]:
    """So many of them, no two alike."""
    found: dict[str, None] = {}
    while len(found) < many:
        found[drawn(kind, random_)] = None
    return list(found)
