"""A text of a given length in tokens, made of as many units as fit and, where those are coarse, of some more words."""

from collections.abc import Callable
from dataclasses import dataclass

from analysis.errors import InputError

Count = Callable[[str], int]
"""How many tokens a text has."""
CLOSE = 0.005
"""A text is long enough where it lacks no more than this share of the tokens."""


@dataclass(frozen=True)
class Draft:
    """What a generator makes: a context, a question, how the answer begins, and the reference answers."""

    context: str
    question: str
    answer_prefix: str
    answer: tuple[str, ...]
    depth: float | None = None

    @property
    def text(self) -> str:
        """What is counted."""
        return self.context + self.question + self.answer_prefix


Build = Callable[[int, int], Draft]
"""A draft of so many units of haystack and so many words of filler; the same draft each time, and longer with each of them."""


def fitted(build: Build, length: int, count: Count, least: int = 1) -> Draft:
    """The longest draft of at most `length` tokens.

    Units are added as long as they fit; what then lacks is filled word by word.

    Args:
        build: makes a draft.
        length: tokens of context, question and answer prefix together, at most.
        count: tokens of a text.
        least: units without which the task is no task.

    Raises:
        InputError: not even `least` units fit.
    """

    def size(units: int, words: int = 0) -> int:
        return count(build(units, words).text)

    if (smallest := size(least)) > length:
        raise InputError(
            f"a context length of {length} tokens is too short for this task and tokenizer: it takes at least {smallest}"
        )
    units, held = _most(size, least, smallest, length)
    words = 0
    if length - held > CLOSE * length and size(units, 1) > held:  # of drafts that take filler
        words, _ = _most(lambda more: size(units, more), 0, held, length)
    return build(units, words)


def _most(size: Callable[[int], int], low: int, at_low: int, limit: int) -> tuple[int, int]:
    """The largest number whose size is within the limit, and that size; `low` is one. Sizes grow almost in proportion."""
    high: int | None = None
    step, slope, still = 1, 0.0, 0
    for attempt in range(200):
        if high is not None and high - low <= 1:
            break
        guess = low + max(int((limit - at_low) / slope), 1) if slope else low + step
        if attempt > 8 and high is not None:  # where a secant creeps
            guess = (low + high) // 2
        if high is not None:
            guess = min(guess, high - 1)
        found = size(guess)
        slope = max((found - at_low) / (guess - low), 0.0) or slope
        still = still + 1 if found <= at_low else 0
        if still > 4:  # there is no more to be had
            break
        if found <= limit:
            low, at_low, step = guess, found, step * 2
        else:
            high = guess
        if 0 <= limit - at_low < CLOSE * limit / 4:
            break
    return low, at_low
