"""What an evaluation or a sweep is asked to do: one frozen value, checked before any work begins. Loads neither torch nor transformers."""

import ast
import dataclasses
import difflib
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.errors import InputError
from analysis.settings import DTYPES, REFERENCE

POLICIES = ("snapkv", "snapkv+two-stage", "adakv+two-stage", "fisher", "start-recent", "random")
"""What is compared where nothing is said: attention-only, two-stage, two-stage with budgets over heads, behaviour, and two baselines."""


@dataclass(frozen=True)
class Grid:
    """Models × tasks × context lengths × seeds × samples × policies × budgets.

    Attributes:
        models: Hugging Face ids, folders or the reference model.
        tasks: as `analysis.tasks.task` knows them, groups (`ruler-offline`) among them.
        lengths: tokens of context, question and answer prefix.
        policies: names, with parameters where they differ from the defaults (`snapkv:pooling=none`).
        budgets: shares of the context's entries (float), or entries per KV head (int).
        samples: of each task, length and seed.
        seeds: of what is drawn.
        aware: whether the question is seen when entries are chosen.
        raw: never use a chat template.
        max_new_tokens: in place of the tasks' own; None leaves them.
        metric: in place of the tasks' own.
        data: what qa_1, qa_2 and LongBench's tasks read.
        depths: of the task `needle`.
        haystack: a text file that needles are hidden in.
        judge: queries of each answer whose attention outputs are compared.
        device, dtype: of the models.
        device_map: how a model that is too large for one device is laid over several ("auto"); in place of `device`.

    Raises:
        InputError: a setting is outside its range.
    """

    models: tuple[str, ...] = (REFERENCE,)
    tasks: tuple[str, ...] = ("niah_single_1",)
    lengths: tuple[int, ...] = (1024,)
    policies: tuple[str, ...] = POLICIES
    budgets: tuple[int | float, ...] = (0.1, 0.2, 0.4)
    samples: int = 10
    seeds: tuple[int, ...] = (0,)
    aware: bool = False
    raw: bool = False
    max_new_tokens: int | None = None
    metric: str | None = None
    data: str | None = None
    depths: int = 5
    haystack: Path | None = None
    judge: int = 8
    device: str = "cpu"
    dtype: str = "float32"
    device_map: str | None = None

    def __post_init__(self) -> None:
        for name, option in (("models", "--model"), ("tasks", "--task"), ("lengths", "--context-length"), ("seeds", "--seed")):
            _listed(option, getattr(self, name))
        for name, option in (("policies", "--policies"), ("budgets", "--budgets")):
            if getattr(self, name):
                _listed(option, getattr(self, name))
        for option, values, least in (
            ("--context-length", self.lengths, 1),
            ("--seed", self.seeds, 0),
            ("--samples", (self.samples,), 1),
            ("--depths", (self.depths,), 1),
            ("--judge", (self.judge,), 0),
            ("--max-new-tokens", () if self.max_new_tokens is None else (self.max_new_tokens,), 1),
        ):
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise InputError(f"{option} must be a whole number of at least {least}, not {value!r}")
        if max(self.seeds) >= 2**32:
            raise InputError(f"--seed must be below 2³², not {max(self.seeds)}")
        for budget in self.budgets:
            if not (0 < budget <= 1 if isinstance(budget, float) else budget >= 2):
                raise InputError(
                    f"a budget is a share of the cache in (0, 1], such as 0.2, or at least 2 entries, such as 512; not {budget!r}"
                )
        if bool(self.policies) != bool(self.budgets):
            raise InputError("policies need budgets and budgets policies; name both, or neither for the full cache alone")
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype is one of {', '.join(DTYPES)}, not {self.dtype!r}")

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON can hold them."""
        values = dataclasses.asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
            for name, value in values.items()
        }


def _listed(option: str, values: tuple[Any, ...]) -> None:
    if not values:
        raise InputError(f"{option} names nothing")
    if len(set(values)) < len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise InputError(f"{option} names {twice!r} twice")


def split_policy(text: str) -> tuple[str, dict[str, Any]]:
    """`snapkv:window=16:pooling=none` as a name and its parameters.

    Raises:
        InputError: a parameter has no value.
    """
    name, *parts = re.split(r":(?=\w+=)", text)
    settings: dict[str, Any] = {}
    for part in parts:
        key, _, value = part.partition("=")
        settings[key] = literal(value)
    # a colon that no parameter follows belongs to a file's name, or is a mistake
    for part in (name, *(value for key, value in settings.items() if key != "scores")):
        if ":" in str(part):
            lost = str(part).partition(":")[2]
            raise InputError(f"{text!r}: a policy's parameters are written as snapkv:window=16:pooling=none; {lost!r} is none")
    return name.strip(), settings


def literal(text: str) -> Any:
    """A number, True, False, None or a tuple where the text is one; else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parted(text: str, option: str) -> tuple[str, ...]:
    """The parts of a text between commas.

    Raises:
        InputError: there is none.
    """
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise InputError(f"{option} names nothing")
    return found


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers between commas.

    Raises:
        InputError: a part is none.
    """
    try:
        return tuple(int(part) for part in parted(text, option))
    except ValueError:
        raise InputError(f"{option} takes whole numbers separated by commas, such as 1024,2048; not {text!r}") from None


def budgets(text: str, option: str = "--budgets") -> tuple[int | float, ...]:
    """Budgets between commas: 512 is a number of entries, 0.2 a share.

    Raises:
        InputError: a part is no number.
    """
    try:
        return tuple(int(part) if part.isdigit() else float(part) for part in parted(text, option))
    except ValueError:
        raise InputError(f"{option} takes numbers separated by commas, such as 0.1,0.2 or 256,512; not {text!r}") from None


def nearest(name: str, known: tuple[str, ...]) -> str:
    """What a mistyped name may have been, as the end of a message."""
    near = difflib.get_close_matches(name, known, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"


KINDS: tuple[tuple[str, Any, str], ...] = (
    ("str", str, "text"),
    ("Path", str, "text"),
    ("bool", bool, "true or false"),
    ("float", (int, float), "numbers"),
    ("int", int, "whole numbers"),
)
"""What a setting's type is called in TOML, the first that its annotation names."""


def from_toml(path: Path, **changes: Any) -> Grid:
    """A grid from a TOML file whose keys are those of `Grid`; `changes` that are not None take the place of what it says.

    Raises:
        InputError: the file cannot be read, is no TOML, has a key that is none, or a value of another type.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is no TOML: {error}") from error
    known = {item.name: item for item in dataclasses.fields(Grid)}
    for name, value in values.items():
        if name not in known:
            raise InputError(f"{path}: there is no setting {name!r}; {nearest(name, tuple(known))}")
        kind = str(known[name].type)
        if kind.startswith("tuple"):
            if not isinstance(value, list):
                raise InputError(f"{path}: {name} is a list, such as {json.dumps(getattr(Grid, name))}; not {value!r}")
            values[name] = tuple(value)
        for part in value if isinstance(value, list) else [value]:
            needed, word = next((types, word) for sign, types, word in KINDS if sign in kind)
            if not isinstance(part, needed) or (isinstance(part, bool) and needed is not bool):
                raise InputError(f"{path}: {name} is made of {word}, not {part!r}")
    return made(**{**values, **{name: value for name, value in changes.items() if value is not None}})


def made(**values: Any) -> Grid:
    """A grid of those settings that are not None."""
    given = {name: value for name, value in values.items() if value is not None}
    if "haystack" in given:
        given["haystack"] = Path(given["haystack"])
    return Grid(**given)
