"""Scores that look at no attention: baselines that no study may skip."""

from dataclasses import dataclass
from typing import ClassVar

import numpy
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eviction.checks import whole
from eviction.observation import Observation


@dataclass(frozen=True)
class KeyNorm:
    """1 / (1 + ‖k_i‖₂): keys of small norm tend to be looked at. Source: Devoto et al. (arXiv 2406.11430), which ranks by −‖k‖.

    Attributes:
        recent: entries at the end that are always kept.
    """

    recent: int = 0

    source: ClassVar[str] = "Devoto et al., arXiv 2406.11430"

    def __post_init__(self) -> None:
        whole("recent", self.recent, 0)

    @property
    def queries(self) -> int:
        """None are looked at; one is captured."""
        return 1

    @property
    def ends(self) -> tuple[int, int]:
        """The recent entries are kept."""
        return 0, self.recent

    def __call__(self, seen: Observation, protected: Bool[Tensor, "batch _ keys"]) -> Float[Tensor, "batch heads keys"]:
        """In (0, 1]."""
        keys = seen.record.keys
        size = keys.to(torch.promote_types(torch.float32, keys.dtype)).norm(dim=-1)
        return (1 / (1 + size)).repeat_interleave(seen.record.group, 1)


@dataclass(frozen=True)
class StartRecent:
    """The first `sink` entries and the most recent ones. Source: StreamingLLM (arXiv 2309.17453).

    Attributes:
        sink: entries at the start that are always kept; the rest of the budget are the last entries.
    """

    sink: int = 4

    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"

    def __post_init__(self) -> None:
        whole("sink", self.sink, 0)

    @property
    def queries(self) -> int:
        """None are looked at; one is captured."""
        return 1

    @property
    def ends(self) -> tuple[int, int]:
        """The sink is kept."""
        return self.sink, 0

    def __call__(self, seen: Observation, protected: Bool[Tensor, "batch _ keys"]) -> Float[Tensor, "batch heads keys"]:
        """The later, the higher."""
        place = seen.valid.cumsum(-1).to(torch.float32)
        return seen.per_head(place / place.amax(-1, keepdim=True)).expand(-1, seen.record.n_heads, -1)


@dataclass(frozen=True)
class Random:
    """Uniform random numbers, the same for every head of a KV group, beside protected ends: the baseline to beat.

    A token's number depends on its place in its own row alone: it is the same in any batch, and when the policy chooses again.

    Attributes:
        seed: with the layer, it determines every number, on every machine.
        sink: entries at the start that are always kept.
        recent: entries at the end that are always kept.
    """

    seed: int = 0
    sink: int = 4
    recent: int = 32

    source: ClassVar[str] = "baseline"

    def __post_init__(self) -> None:
        whole("seed", self.seed, 0)
        whole("sink", self.sink, 0)
        whole("recent", self.recent, 0)

    @property
    def queries(self) -> int:
        """None are looked at; one is captured."""
        return 1

    @property
    def ends(self) -> tuple[int, int]:
        """Both ends are kept."""
        return self.sink, self.recent

    def __call__(self, seen: Observation, protected: Bool[Tensor, "batch _ keys"]) -> Float[Tensor, "batch heads keys"]:
        """In [0, 1], drawn on the CPU: of a sequence for each place, so that more places change nothing before them."""
        record, places = seen.record, seen.own_places.clamp(min=0)
        drawn = numpy.random.default_rng((self.seed, record.layer)).random((int(places.amax()) + 1, seen.n_kv_heads))
        numbers = torch.from_numpy(drawn).to(record.keys.device, torch.float32).T
        each = numbers.expand(places.shape[0], -1, -1).gather(2, places.expand(-1, seen.n_kv_heads, -1))
        return each.repeat_interleave(record.n_heads // seen.n_kv_heads, 1)
