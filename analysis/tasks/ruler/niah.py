"""RULER's eight needle tasks: values hidden in a haystack under keys, and asked for by key."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from analysis.tasks.asked import Asked
from analysis.tasks.fitting import Build, Draft
from analysis.tasks.haystack import noise, noise_words, run, sentences
from analysis.tasks.words import Kind, different, drawn

DEPTHS = 40
"""Evenly spaced places in real text at which a needle may stand."""
NEEDLE = "One of the secret {kind} for {key} is: {value}."


@dataclass(frozen=True)
class Needles:
    """What tells the eight apart.

    Attributes:
        hay: "noise" repeats sentences, "text" is real text, "needles" are needles that nobody asks for.
        key, value: what keys and values are made of.
        keys: how many keys are hidden.
        values: how many values each has.
        queries: how many keys are asked for.
    """

    hay: Literal["noise", "text", "needles"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def least(self) -> int:
        """Units of haystack without which the needles have no places: words of real text, or sentences."""
        return DEPTHS if self.hay == "text" else self.keys * self.values


KINDS: dict[str, Needles] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("text"),
    "niah_single_3": Needles("text", value="uuids"),
    "niah_multikey_1": Needles("text", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles("text", values=4),
    "niah_multiquery": Needles("text", keys=4, queries=4),
}
MAX_NEW_TOKENS = 128


def builder(kind: Needles) -> Callable[[Asked, random.Random], tuple[Build, int]]:
    """What makes samples of a kind: of what is asked and a source of chance, a draft's builder and the least units it takes."""

    def make(asked: Asked, random_: random.Random) -> tuple[Build, int]:
        keys = different(kind.key, kind.keys, random_)
        values = [different(kind.value, kind.values, random_) for _ in keys]
        needles = [_needle(kind, key, value) for key, own in zip(keys, values, strict=True) for value in own]
        random_.shuffle(needles)
        wanted = random_.sample(range(kind.keys), kind.queries)
        answer = tuple(value for place in wanted for value in values[place])
        start, places, hay = random_.randrange(len(asked.haystack)), random_.getrandbits(64), random_.getrandbits(64)

        def build(units: int, words: int) -> Draft:
            # sources of their own, so that a longer draft begins as a shorter one does
            at, straws = random.Random(places), random.Random(hay)  # noqa: S311
            if kind.hay == "text":
                parts, joint = sentences(run(asked.haystack, start, units)), " "
                depths = sorted(at.sample(range(DEPTHS), len(needles)))
                where = [len(parts) * depth // (DEPTHS - 1) for depth in depths]
            else:
                if kind.hay == "noise":
                    parts = noise(units)
                else:
                    parts = [_needle(kind, drawn(kind.key, straws), drawn(kind.value, straws)) for _ in range(units)]
                joint = "\n"
                where = sorted(at.sample(range(units), len(needles)))
            for place, needle in reversed(list(zip(where, needles, strict=True))):
                parts.insert(place, needle)
            text = joint.join([*([noise_words(words)] if words else []), *parts])
            depth = text.index(needles[0]) / len(text) if len(needles) == 1 else None
            return _draft(kind, text, [keys[place] for place in wanted], answer, depth)

        return build, kind.least

    return make


def _needle(kind: Needles, key: str, value: str) -> str:
    return NEEDLE.format(kind=kind.value, key=key, value=value)


def _draft(kind: Needles, text: str, queries: list[str], answer: tuple[str, ...], depth: float | None) -> Draft:
    single = len(answer) == 1
    name = kind.value.removesuffix("s") if single else kind.value
    asked = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    hidden, them = (f"A secret {name} is", "it") if single else (f"Some secret {name} are", "them")
    are, every = ("is", "") if single else ("are", "all ")
    return Draft(
        f"{hidden} hidden in the text below. Remember {them}, for you will be asked about {them} afterwards.\n{text}\n",
        f"What {are} {every}the secret {name} for {asked} in the text above?",
        f" The secret {name} for {asked} in the text above {are}",
        answer,
        depth,
    )
