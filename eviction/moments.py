"""When a policy chooses: after the prompt, after each chunk of it, while decoding."""

from dataclasses import dataclass

from eviction.allocate import require_budget
from eviction.checks import whole


@dataclass(frozen=True)
class Moments:
    """After which passes of a model a policy chooses what stays.

    A pass of several tokens is a prompt, or a chunk of one (`prefill_chunk_size`), or a later turn: with `prefill` the policy
    chooses after each. A pass of one token decodes: with `every` it chooses after every so many tokens, to a number of entries once
    there are more of them, so that a KV head never holds more than that number and `every` (on average, where budgets differ), or to a
    fraction of all that was seen.

    Attributes:
        prefill: after each pass of several tokens.
        every: tokens between two choices while decoding; None chooses nothing then.
        target: the budget while decoding; None is the same as for the prompt.

    Raises:
        ValueError: `every` is below 1, there is no moment at all, or a target for none.
        BudgetError: the target is outside its range.
    """

    prefill: bool = True
    every: int | None = None
    target: int | float | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            whole("every", self.every, 1)
        if not self.prefill and self.every is None:
            raise ValueError("there is no moment to choose at: give prefill=True, or every=… for decoding")
        if self.target is not None:
            if self.every is None:
                raise ValueError(f"a target of {self.target} while decoding needs every=…, the tokens between two choices")
            require_budget(self.target)
