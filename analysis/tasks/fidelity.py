"""Language modelling as a task: real text, and the words with which it goes on."""

import random

from analysis.errors import InputError
from analysis.tasks.asked import Asked
from analysis.tasks.fitting import Build, Draft
from analysis.tasks.haystack import run

FOLLOWING = 64
"""Words that follow, of which the first `MAX_NEW_TOKENS` tokens are judged."""
LEAST = 20
MAX_NEW_TOKENS = 64


def fidelity(asked: Asked, random_: random.Random) -> tuple[Build, int]:
    """Nothing is asked and nothing generated: the model is given the words that follow, and what it says of each is judged."""
    start = random_.randrange(len(asked.haystack))

    def build(units: int, words: int) -> Draft:
        if units + FOLLOWING > len(asked.haystack):
            raise InputError(
                f"fidelity: a text of {len(asked.haystack)} words is too short for {asked.length} tokens and the words that follow; give a "
                "longer one by --haystack, or a smaller length"
            )
        # the words that follow are the same at any length
        return Draft(run(asked.haystack, start - units, units), "", "", (" " + run(asked.haystack, start, FOLLOWING),))

    return build, LEAST
