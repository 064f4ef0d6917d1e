"""RULER's `cwe` and `fwe`: which words are the most frequent of a list, and of a coded text."""

import random
import string

import numpy as np
from scipy.special import zeta

from analysis.tasks.asked import Asked
from analysis.tasks.fitting import Build, Draft
from analysis.tasks.haystack import noise_words
from analysis.tasks.words import different, english

COMMON = 10
SHORT = 4096
"""Tokens below which words are repeated less often."""
VOCABULARY, LETTERS, ALPHA, ASKED = 2000, 6, 2.0, 3
LEAST = 74
"""Words of a coded text from which on the fourth rank is more frequent than the fifth, for exponent 2."""
MAX_NEW_TOKENS = {"cwe": 120, "fwe": 50}


def common_words(asked: Asked, random_: random.Random) -> tuple[Build, int]:
    """A numbered list in which ten words are repeated 30 times and the others 3 times (6 and once below 4,096 tokens).

    Units are the other words. An example with its answer comes first.
    """
    words = english("noun", "adjective", "verb")
    often, seldom = (30, 3) if asked.length >= SHORT else (6, 1)
    shown, shown_often, shown_seldom = (40, 10, 3) if asked.length >= SHORT else (20, 3, 1)
    mixed = random_.sample(words, len(words))
    order, beyond = random_.getrandbits(64), random_.getrandbits(64)
    example = _listed(mixed[:shown], shown_often, shown_seldom, order, 0)
    before = f"{example.context}{example.question}{example.answer_prefix} {', '.join(example.answer)}\n\n"
    fresh = mixed[shown:]

    def build(units: int, filler: int) -> Draft:
        lacking = COMMON + units - len(fresh)
        # where the words of English run out, pairs of them follow
        pairs = different("words", lacking, random.Random(beyond)) if lacking > 0 else []  # noqa: S311
        draft = _listed([*fresh, *pairs][: COMMON + units], often, seldom, order, filler)
        return Draft(before + draft.context, draft.question, draft.answer_prefix, draft.answer)

    return build, COMMON


def _listed(words: list[str], often: int, seldom: int, order: int, filler: int) -> Draft:
    """The first `COMMON` words `often`, the others `seldom`, shuffled and numbered."""
    entries = words[:COMMON] * often + words[COMMON:] * seldom
    random.Random(order).shuffle(entries)  # noqa: S311
    text = " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))
    opening = f"{noise_words(filler)}\n" if filler else ""
    return Draft(
        f"{opening}Below is a numbered list of words, some of them more often than others. Remember the most frequent ones.\n{text}\n",
        f"Question: Which {COMMON} words are the most frequent in the list above?",
        f" Answer: The {COMMON} words that are the most frequent in the list are:",
        tuple(words[:COMMON]),
    )


def frequent_words(asked: Asked, random_: random.Random) -> tuple[Build, int]:
    """Coded words whose frequency falls with the square of their rank (zeta's law); dots come first, the next three are asked for."""
    names: dict[str, None] = {}
    while len(names) < VOCABULARY:
        names["".join(random_.choices(string.ascii_lowercase, k=LETTERS))] = None
    words = ["...", *list(names)[1:]]
    shares = np.arange(1, VOCABULARY + 1) ** -ALPHA / zeta(ALPHA)
    order = random_.getrandbits(64)

    def build(units: int, filler: int) -> Draft:
        entries = [word for word, times in zip(words, (units * shares).astype(int), strict=True) for _ in range(times)]
        random.Random(order).shuffle(entries)  # noqa: S311
        opening = f"{noise_words(filler)}\n" if filler else ""
        return Draft(
            f"{opening}Read the coded text below, and count how often each coded word stands there. Dots are no words.\n{' '.join(entries)}\n",
            f"Question: Which {ASKED} coded words are the most frequent in the text above? Give no explanation, and leave the dots out.",
            f" Answer: The {ASKED} coded words that are the most frequent in the text above are:",
            tuple(words[1 : ASKED + 1]),
        )

    return build, LEAST
