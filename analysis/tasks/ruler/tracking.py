"""RULER's `vt`: a chain of variables that hand a value on, scattered over noise; all that hold the value are asked for."""

import itertools
import random
import string

from analysis.tasks.asked import Asked
from analysis.tasks.fitting import Build, Draft
from analysis.tasks.haystack import noise, noise_words

HOPS = 4
EXAMPLE_NOISE = 15
MAX_NEW_TOKENS = 30


def tracking(asked: Asked, random_: random.Random) -> tuple[Build, int]:
    """One chain of four hops, so five variables; an example with its answer comes first."""
    example = _text(*_chain(3, random_), noise(EXAMPLE_NOISE), random_.getrandbits(64))
    shown = f"{example.context}{example.question}{example.answer_prefix} {' '.join(example.answer)}\n\n"
    names, chain = _chain(5, random_)
    places = random_.getrandbits(64)

    def build(units: int, words: int) -> Draft:
        hay = [*([noise_words(words)] if words else []), *noise(units)]
        draft = _text(names, chain, hay, places)
        return Draft(shown + draft.context, draft.question, draft.answer_prefix, draft.answer)

    return build, HOPS + 1


def _chain(letters: int, random_: random.Random) -> tuple[list[str], list[str]]:
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(random_.choices(string.ascii_uppercase, k=letters))] = None
    found = list(names)
    value = random_.randint(10_000, 99_999)
    said = [f"VAR {found[0]} = {value}", *(f"VAR {new} = VAR {old}" for old, new in itertools.pairwise(found))]
    return found, said


def _text(names: list[str], chain: list[str], hay: list[str], places: int) -> Draft:
    """The chain's links in their order, between sentences of the hay."""
    parts = list(hay)
    where = sorted(random.Random(places).sample(range(len(parts)), len(chain)))  # noqa: S311
    for place, link in reversed(list(zip(where, chain, strict=True))):
        parts.insert(place, link)
    value = chain[0].rpartition(" ")[2]
    text = "\n".join(parts)
    return Draft(
        f"Variables are assigned in the text below, some of them to one another. Keep track of every assignment.\n\n{text}\n",
        f"Question: Which variables hold the value {value} in the text above?",
        f" Answer: By the assignments in the text above, {len(names)} variables hold the value {value}; they are:",
        tuple(names),
    )
