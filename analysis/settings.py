"""What a validation is asked to do: one frozen value, checked before any work begins."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from analysis.ablations import ABLATIONS, IN_ONE_RUN, middle_budget
from analysis.errors import InputError

REFERENCE = "SmolLM2-135M-Instruct"
DTYPES = ("float32", "float64", "bfloat16", "float16")
POOLINGS = ("max", "mean", "none")


@dataclass(frozen=True)
class ValidationSettings:
    """Settings of `criticalkv validate`; the same settings on the same machine give the same rows.

    Raises:
        InputError: a setting is outside its range.
    """

    model: str = REFERENCE
    context_files: tuple[Path, ...] = ()
    passages: int = 8
    context_length: int = 1024
    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    budgets: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    alpha: float = 0.5
    epsilon: float = 1e-4
    ablations: tuple[str, ...] = IN_ONE_RUN
    lengths: tuple[int, ...] = ()
    """Tokens of each context, several times over; none: `context_length` alone."""
    leave_one_out: int = 128
    """Tokens of each context whose removals are measured exactly, one by one; 0 leaves that out."""
    others: bool = True
    """Whether policies that divide budgets, and the optima of single heads, are measured too."""
    full: bool = False
    """Also time the policies, and let the model answer RULER's tasks at 40 % cache: what takes long."""
    answers: Path | None = None
    """The folder of an evaluation whose rows the claims about tasks are judged by."""
    later: int = 32
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("passages", "context_length", "window", "kernel", "later"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed must be a whole number from 0 to 2³² − 1, not {self.seed}")
        for name in self.ablations:
            if name not in ABLATIONS:
                raise InputError(f"no ablation is called {name!r}; there are {', '.join(ABLATIONS)}")
        if self.full and self.answers is not None:
            raise InputError("--full makes answers of its own; give either it or --answers")
        for length in self.lengths:
            if length < 1:
                raise InputError(f"a context has at least 1 token, not {length}")
        if self.leave_one_out < 0 or self.leave_one_out == 1:
            raise InputError(f"--leave-one-out is 0 (none) or at least 2 tokens, not {self.leave_one_out}")
        if self.kernel % 2 == 0:
            raise InputError(f"--kernel must be odd, so that it has a middle; not {self.kernel}")
        if self.pooling not in POOLINGS:
            raise InputError(f"--pooling is one of {', '.join(POOLINGS)}, not {self.pooling!r}")
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype is one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if not self.budgets:
            raise InputError("--budgets needs at least one share of the cache, such as 0.2")
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise InputError(f"a budget is a share of the cache in (0, 1], not {budget:g}")
        if len(set(self.budgets)) < len(self.budgets):
            raise InputError(f"--budgets names a budget twice: {', '.join(f'{budget:g}' for budget in self.budgets)}")
        if not 0 <= self.alpha <= 1:
            raise InputError(f"--alpha lies in [0, 1], not at {self.alpha:g}")
        if not 0 <= self.epsilon < float("inf"):
            raise InputError(f"--epsilon must be a finite number of at least 0, not {self.epsilon:g}")

    @property
    def middle_budget(self) -> float:
        """The budget of what is measured at one budget."""
        return middle_budget(self.budgets)

    @property
    def every_length(self) -> tuple[int, ...]:
        """Tokens of each context, at most; several where contexts are measured at several lengths."""
        return self.lengths or (self.context_length,)

    def as_dict(self) -> dict[str, object]:
        """The settings as JSON can hold them."""
        values = dataclasses.asdict(self)
        values["answers"] = None if self.answers is None else str(self.answers)
        values["context_files"] = [str(path) for path in self.context_files]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def fingerprint(self, contexts: list[tuple[str, str]], versions: dict[str, str]) -> str:
        """A digest of settings, texts (name, content) and versions: what a continued run must agree on."""
        return hashlib.sha256(json.dumps([self.as_dict(), contexts, versions], sort_keys=True).encode()).hexdigest()
