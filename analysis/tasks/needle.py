"""A needle in a haystack over length and depth: one sentence in real text, and a question for it."""

import itertools
import random

from analysis.errors import InputError
from analysis.tasks.asked import Asked
from analysis.tasks.fitting import Build, Draft
from analysis.tasks.haystack import run, sentences
from analysis.tasks.words import drawn

CITIES = ("Lisbon", "Oslo", "Quito", "Hanoi", "Cairo", "Lima", "Vienna", "Nairobi", "Dublin", "Riga", "Porto", "Bergen")
STATED = "The pass number of the city of {city} is {answer}."
ANSWERED = "The pass number of the city of {city} is"
LEAST = 40
MAX_NEW_TOKENS = 24


def needle(asked: Asked, random_: random.Random, number: int) -> tuple[Build, int]:
    """Sample `number` has its needle at depth (number mod depths) / (depths − 1).

    Raises:
        InputError: there are no depths.
    """
    if asked.depths < 1:
        raise InputError(f"--depths must be at least 1, not {asked.depths}")
    depth = (number % asked.depths) / (asked.depths - 1) if asked.depths > 1 else 0.5
    city, answer = random_.choice(CITIES), drawn("numbers", random_)
    start = random_.randrange(len(asked.haystack))

    def build(units: int, words: int) -> Draft:
        parts = sentences(run(asked.haystack, start, units))
        ends = [0, *itertools.accumulate(len(part) + 1 for part in parts)]
        place = min(
            range(len(ends)), key=lambda at: abs(ends[at] - depth * ends[-1])
        )  # the sentence's end nearest to the depth
        parts.insert(place, STATED.format(city=city, answer=answer))
        return Draft(
            " ".join(parts) + "\n\n",
            f"What is the pass number of the city of {city}?",
            " " + ANSWERED.format(city=city),
            (answer,),
            depth,
        )

    return build, LEAST
