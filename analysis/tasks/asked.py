"""What a generator is asked for."""

import random
from dataclasses import dataclass, field

from analysis.tasks.fitting import Count
from analysis.tasks.haystack import documentation


@dataclass(frozen=True)
class Asked:
    """A number of samples of a length.

    Attributes:
        samples: how many.
        length: tokens of each: of context, question and answer prefix together (chat template and answer come on top).
        count: how many tokens a text has, by the model's tokenizer.
        seed: of everything that is drawn. The same seed, length and tokenizer make the same samples; more samples begin with the same.
        haystack: words of the real text that needles are hidden in; Python's documentation where nothing is said.
        depths: how many places, from the start of the context to its end, the task `needle` goes through.
        data: what qa_1, qa_2 and LongBench's tasks read: a folder, a file or a name on the hub.
    """

    samples: int
    length: int
    count: Count
    seed: int = 0
    haystack: tuple[str, ...] = field(default_factory=documentation, repr=False)
    depths: int = 5
    data: str | None = None

    def random(self, task: str, number: int) -> random.Random:
        """The source of what sample `number` of a task draws, the same in every run."""
        return random.Random(f"{task} {self.seed} {number}")  # noqa: S311
