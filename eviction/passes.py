"""One pass of a model that is evicted from, and what is decided after it."""

import inspect
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxtyping import Bool
from torch import Tensor, nn
from transformers.cache_utils import Cache

from eviction.cache import RaggedLayer
from eviction.cache.broken import Before
from eviction.cache.compact import slots_of
from eviction.cache.recent import Recent
from eviction.observation import Observation
from eviction.policy import Scored
from eviction.select import Decision
from hooks.dispatch import AttentionCall


@dataclass(frozen=True)
class Eviction:
    """What was decided after one pass.

    `decisions` are those of the layers that hold entries, in order, over all tokens `seen`: what stays of them. `keep` has one mask for
    each decoder layer, as `hooks.hiding` takes them: that of the layer whose entries it reads, or None where it has no attention.
    """

    cache: Cache
    seen: int
    decisions: tuple[Decision, ...]
    keep: tuple[Bool[Tensor, "batch _ seen"] | None, ...]


Watch = Callable[[Eviction], None]


@dataclass
class Pass:
    """One pass of the model over one cache."""

    cache: Cache
    tokens: int
    batch: int
    padding: Tensor | None
    budget: int | float | None
    """None where no choice follows."""
    looks: bool
    before: Before
    ids: Tensor | None = None
    """The pass's tokens, for a policy that runs them again."""
    thread: threading.Thread = field(default_factory=threading.current_thread)
    calls: Counter[int] = field(default_factory=Counter)
    order: list[tuple[int, int]] = field(default_factory=list)
    spans: dict[tuple[int, int], tuple[RaggedLayer, Tensor | None]] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict)
    readers: Counter[int] = field(default_factory=Counter)
    recent: dict[int, Recent | None] = field(default_factory=dict)
    scored: dict[int, list[Scored]] = field(default_factory=dict)
    waiting: list[tuple[int, tuple[int, int], Observation, Tensor | None]] = field(default_factory=list)
    """Cache layer, attention call, what is seen and the tokens of its queries, where scores need another pass."""
    reading: tuple[AttentionCall, RaggedLayer] | None = None

    @cached_property
    def pads(self) -> Tensor | None:
        """Pads of each row."""
        return None if self.padding is None else (~self.padding).sum(-1)


def changed(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], changes: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with some of them changed, whichever way they were given."""
    names = list(inspect.signature(model.forward).parameters)[: len(args)]
    changed = tuple(changes.get(name, value) for name, value in zip(names, args, strict=False))
    return changed, {**kwargs, **{name: value for name, value in changes.items() if name not in names}}


def held_by(layer: Any) -> int:
    """Entries that a layer holds side by side, gaps among them."""
    return slots_of(layer).shape[2]


def over_all(layer: Any, decision: Decision) -> Decision:
    """The decision over the entries of a layer, over all tokens seen."""
    slots, seen = slots_of(layer).long(), layer.get_seq_length()

    def spread(mask: Tensor) -> Tensor:
        mask = mask[..., -slots.shape[2] :]
        at = slots.where(slots >= 0, seen).expand_as(mask)
        return mask.new_zeros(*mask.shape[:2], seen + 1).scatter_(2, at, mask)[..., :seen]

    return Decision(spread(decision.keep), None if decision.stage1 is None else spread(decision.stage1))
