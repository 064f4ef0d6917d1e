"""A needle in a haystack over length and depth: one sentence in real text, and a question for it."""

import random
import re

from analysis.errors import InputError
from analysis.tasks.asked import Asked
from analysis.tasks.fitting import Build, Draft
from analysis.tasks.haystack import run
from analysis.tasks.words import drawn

CITIES = ("Lisbon", "Oslo", "Quito", "Hanoi", "Cairo", "Lima", "Vienna", "Nairobi", "Dublin", "Riga", "Porto", "Bergen")
STATED = "The pass number of the city of {city} is {answer}."
ANSWERED = "The pass number of the city of {city} is"
ENDS = re.compile(r"(?<=[.!?])\s")
NEAR = 0.02
"""Of the text's length: how far from its depth a needle may stand, so that a sentence is not cut."""
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
        text = run(asked.haystack, start, units)
        ends = [0, *(end.start() for end in ENDS.finditer(text)), len(text)]
        place = min(ends, key=lambda at: abs(at - depth * len(text)))
        if abs(place - depth * len(text)) > NEAR * len(text):  # where no sentence ends nearby, a word does
            place = max(text.rfind(" ", 0, round(depth * len(text)) + 1), 0)
        stated = STATED.format(city=city, answer=answer)
        return Draft(
            f"{text[:place]} {stated} {text[place:].lstrip()}".strip() + "\n\n",
            f"What is the pass number of the city of {city}?",
            " " + ANSWERED.format(city=city),
            (answer,),
            depth,
        )

    return build, LEAST
