"""Every policy by name: a base, which accumulates and allocates, and what selects: `snapkv`, `adakv+two-stage`, `h2o+norm`, …

A user's own policy is one function and a name:

Examples:
    >>> @register("longest-values")
    ... def longest(seen):
    ...     '''‖v_i‖₂ of each KV head.'''
    ...     return seen.record.values.float().norm(dim=-1)
    >>> policy("longest-values+two-stage").name
    'longest-values+two-stage'
    >>> unregister("longest-values")
"""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eviction.accumulate import H2O, TOVA, ExpectedAttention, Fisher, KeyNorm, Random, SnapKV, StartRecent, StraightThrough
from eviction.allocate import AdaKV, Global, HeadKV, PyramidKV, Uniform
from eviction.observation import Observation
from eviction.policy import Policy
from eviction.select import AttentionOnly, Centred, Defensive, Greedy, RatioOptimum, SingleEviction, TwoStage, Weighted

Function = Callable[[Observation], Tensor]


@dataclass(frozen=True)
class Parts:
    """The classes that a name stands for, with settings that differ from their own."""

    accumulate: Any
    allocate: Any
    select: Any
    settings: tuple[tuple[str, Any], ...] = ()


BASES: dict[str, tuple[type, type]] = {
    "snapkv": (SnapKV, Uniform),
    "adakv": (SnapKV, AdaKV),
    "headkv": (SnapKV, HeadKV),
    "pyramidkv": (SnapKV, PyramidKV),
    "global": (SnapKV, Global),
    "h2o": (H2O, Uniform),
    "tova": (TOVA, Uniform),
    "expected-attention": (ExpectedAttention, Uniform),
    "fisher": (Fisher, Global),
    "keynorm": (KeyNorm, Uniform),
    "start-recent": (StartRecent, Uniform),
    "random": (Random, Uniform),
}
SELECTORS: dict[str, type] = {
    "two-stage": TwoStage,
    "norm": Weighted,
    "centred": Centred,
    "single-eviction": SingleEviction,
    "defensive": Defensive,
    "ratio": RatioOptimum,
}
WHOLE: dict[str, Parts] = {
    "caote": Parts(SnapKV, Uniform, SingleEviction, (("space", "value"),)),
    "defensivekv": Parts(SnapKV, AdaKV, Defensive, (("over", "max"), ("rule", "forced"))),
    "layer-defensivekv": Parts(SnapKV, Global, Defensive, (("over", "max"),)),
    "fisher-uniform": Parts(Fisher, Uniform, AttentionOnly),
    "fisher-adakv": Parts(Fisher, AdaKV, AttentionOnly),
    "fisher+greedy": Parts(Fisher, Global, Greedy),
    "straight-through": Parts(StraightThrough, Global, AttentionOnly),
    "straight-through-uniform": Parts(StraightThrough, Uniform, AttentionOnly),
    "straight-through-adakv": Parts(StraightThrough, AdaKV, AttentionOnly),
    "straight-through+greedy": Parts(StraightThrough, Global, Greedy),
}
_own: dict[str, tuple[Function, int | None, tuple[int, int]]] = {}


@dataclass(frozen=True)
class Own:
    """A user's function of an `Observation`, giving scores [batch, heads or kv_heads, keys]."""

    function: Function
    queries: int | None = 32
    ends: tuple[int, int] = (0, 0)

    source: ClassVar[str] = "a function of yours"

    def __call__(self, seen: Observation, protected: Bool[Tensor, "batch _ keys"]) -> Float[Tensor, "batch heads keys"]:
        """The function's scores, checked and per query head.

        Raises:
            ValueError: they have another shape, or are not finite.
        """
        scores, record = self.function(seen), seen.record
        shape = (record.keys.shape[0], record.n_heads, record.n_keys)
        if scores.dim() == 3 and scores.shape[1] in (seen.n_kv_heads, record.n_kv_heads):
            scores = scores.repeat_interleave(record.n_heads // scores.shape[1], 1)
        if scores.shape != shape or not bool(scores.isfinite().all()):
            raise ValueError(
                f"{self.function.__name__} returned scores {tuple(scores.shape)}, finite: {bool(scores.isfinite().all())}; needed are finite "
                f"numbers [batch, heads, keys] {shape} or [batch, kv_heads, keys] {tuple(record.keys.shape[:3])}"
            )
        return scores.to(torch.promote_types(torch.float32, scores.dtype))


def register(name: str, *, queries: int | None = 32, ends: tuple[int, int] = (0, 0)) -> Callable[[Function], Function]:
    """Decorator: make a function of an `Observation` a policy's first verb, under `name`; selections compose with it as with ours.

    Args:
        name: a name that is not taken, without "+".
        queries: how many of the last queries the function looks at (None: all of the prompt's).
        ends: entries that are always kept, at the start and at the end.

    Raises:
        ValueError: the name is taken or holds a "+".
    """
    if "+" in name or name in BASES or name in WHOLE or name in _own:
        raise ValueError(f"{name!r} cannot be registered: it is taken, or holds a '+', which joins a base and a selection")

    def keep(function: Function) -> Function:
        _own[name] = (function, queries, ends)
        return function

    return keep


def unregister(name: str) -> None:
    """Take a registered policy back; of ours none can be."""
    del _own[name]


def names() -> list[str]:
    """Every name that `policy` knows."""
    bases = [*BASES, *_own]
    return [*bases, *WHOLE, *(f"{base}+{selector}" for base in bases for selector in SELECTORS)]


def listed() -> list[str]:
    """What a list of policies shows: every name but the selections that go with every base, which stand once, on `snapkv`."""
    return [name for name in names() if "+" not in name or name in WHOLE or name.startswith("snapkv+")]


def parts(name: str) -> Parts:
    """The classes behind a name.

    Raises:
        ValueError: no policy has that name; near ones are suggested.
    """
    if name in WHOLE:
        return WHOLE[name]
    base, _, selector = name.partition("+")
    if (base not in BASES and base not in _own) or (selector not in SELECTORS and "+" in name):
        near = difflib.get_close_matches(name, names(), 3, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`criticalkv policies` lists them"
        raise ValueError(f"no policy is called {name!r}; {hint}")
    accumulate, allocate = BASES.get(base, (Own, Uniform))
    return Parts(accumulate, allocate, SELECTORS.get(selector, AttentionOnly))


def policy(name: str, **settings: Any) -> Policy:
    """The policy of that name; `settings` go to whichever of its three verbs has a parameter of that name (to each that has).

    Examples:
        >>> policy("snapkv+two-stage", window=16, alpha=0.25).select
        TwoStage(alpha=0.25, epsilon=0.0001, share_of='free', epsilon_of='absolute', norm=1, group='product of means')

    Raises:
        ValueError: no policy has that name, or none of its verbs such a parameter, or a value is out of range.
    """
    found = parts(name)
    given = {**dict(found.settings), **settings}
    base = name.partition("+")[0]
    if base in _own:
        function, queries, ends = _own[base]
        given = {"function": function, "queries": queries, "ends": ends, **given}
    verbs = (found.accumulate, found.allocate, found.select)
    known = [{item.name for item in fields(verb)} for verb in verbs]
    if unknown := sorted(set(given) - set().union(*known)):
        have = ", ".join(sorted(set().union(*known))) or "none"
        raise ValueError(f"{name} has no parameter {', '.join(unknown)}; it has {have}")
    for verb in verbs:
        needed = [item.name for item in fields(verb) if item.default is MISSING and item.default_factory is MISSING]
        if lacking := [item for item in needed if item not in given]:
            raise ValueError(f"{name} needs {', '.join(lacking)}: {_first(verb)}")
    made = [verb(**{key: value for key, value in given.items() if key in own}) for verb, own in zip(verbs, known, strict=True)]
    return Policy(name, *made)


@dataclass(frozen=True)
class Description:
    """What there is to know of a policy: for each verb its class, what it does, its source and its parameters with defaults."""

    name: str
    verbs: tuple[tuple[str, str, str, str, tuple[tuple[str, str], ...]], ...]
    queries: str

    @property
    def source(self) -> str:
        """Where what sets the policy apart comes from: its selection, else its scores, else its allocation."""
        accumulate, allocate, select = self.verbs
        plain = (AttentionOnly.__name__, SnapKV.__name__, Uniform.__name__)
        apart = [verb for verb, usual in zip((select, accumulate, allocate), plain, strict=True) if verb[1] != usual]
        return (apart or [accumulate])[0][3]


def describe(name: str) -> Description:
    """Formula, paper, parameters and what is needed, from the classes themselves.

    Raises:
        ValueError: no policy has that name.
    """
    found = parts(name)
    base, given = name.partition("+")[0], dict(found.settings)
    verbs = []
    for verb, cls in (("accumulate", found.accumulate), ("allocate", found.allocate), ("select", found.select)):
        text = inspect.getdoc(cls) or ""
        if cls is Own:
            text = inspect.getdoc(_own[base][0]) or "a function of yours without a docstring"
        parameters = tuple(
            (
                item.name,
                repr(given.get(item.name, item.default)) if item.default is not MISSING or item.name in given else "needed",
            )
            for item in fields(cls)
            if cls is not Own
        )
        verbs.append((verb, cls.__name__, text.partition("\n\nAttributes:")[0], cls.source, parameters))
    if found.accumulate is Own:
        queries = _own[base][1]
    else:
        queries = None if found.accumulate is H2O else getattr(found.accumulate(), "queries", 1)
    seen = (
        "all queries of the prompt" if queries is None else f"the last {queries} queries" if queries > 1 else "the last query"
    )
    return Description(name, tuple(verbs), seen)


def _first(cls: type) -> str:
    return (inspect.getdoc(cls) or cls.__name__).partition("\n")[0]
