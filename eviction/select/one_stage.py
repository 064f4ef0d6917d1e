"""One ranking by what an entry's removal does to the output, by several measures of it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bounds.optimum.dinkelbach import dinkelbach
from eviction.checks import one_of, whole
from eviction.observation import Observation
from eviction.select.decision import Decision, OneRanking, Scores
from eviction.select.top import scaled
from perturbation.single import single_eviction_error


@dataclass(frozen=True)
class Weighted(OneRanking):
    """The top by A_i ‖ν_i‖ in one stage: stage 2 of CriticalKV without its stage 1.

    Attributes:
        norm: p of ‖V W_O‖_p.
        group: "mean of products", what each head's bound asks for on average, or "product of means".
        space: "output", ν_i = v_i W_h as the bound has it; "value", ‖v_i‖_p without W_O, which all heads of a group share.
    """

    norm: Literal[1, 2] = 1
    group: Literal["mean of products", "product of means"] = "mean of products"
    space: Literal["output", "value"] = "output"

    source: ClassVar[str] = "CriticalKV with α = 0, arXiv 2502.03805"

    def __post_init__(self) -> None:
        one_of("norm", self.norm, 1, 2)
        one_of("group", self.group, "product of means", "mean of products")
        one_of("space", self.space, "output", "value")

    def scores(
        self,
        importance: Float[Tensor, "batch heads keys"],
        seen: Observation,
        protected: Bool[Tensor, "batch _ keys"],
        free: Bool[Tensor, "batch _ keys"],
    ) -> Scores:
        """A ‖ν‖ of the group, or A ‖v‖."""
        if self.space == "value":
            record = seen.record
            values = record.values.to(importance.dtype)
            norms = values.norm(p=self.norm, dim=-1).repeat_interleave(record.n_heads // record.n_kv_heads, 1)
        else:
            norms = seen.norms(self.norm)
        if self.group == "mean of products":
            return Scores(seen.grouped(importance * norms), protected, free)
        return Scores(seen.grouped(importance) * seen.grouped(norms), protected, free)


@dataclass(frozen=True)
class Centred(OneRanking):
    """The top by A_i ‖ν_i − ō‖, ō the mean output of the queries that looked: values measured from the output, not from the origin.

    The terms of θ_o (docs/theory.md, C3). Ours.

    Attributes:
        norm: p of ‖·‖_p.
    """

    norm: Literal[1, 2] = 1

    source: ClassVar[str] = "criticalkv, docs/theory.md C3"

    def __post_init__(self) -> None:
        one_of("norm", self.norm, 1, 2)

    def scores(
        self,
        importance: Float[Tensor, "batch heads keys"],
        seen: Observation,
        protected: Bool[Tensor, "batch _ keys"],
        free: Bool[Tensor, "batch _ keys"],
    ) -> Scores:
        """A ‖ν − ō‖ of the group."""
        return Scores(seen.grouped(importance * seen.distances(self.norm)), protected, free)


@dataclass(frozen=True)
class SingleEviction(OneRanking):
    """The top by the exact error of removing the entry alone, ‖Σ_h A/(1 − A) (ν − o_h)‖, mean over the window's queries.

    In value space, L2 and per head it is the score of CAOTE (arXiv 2504.14051) and DropKV; in the residual stream the group is
    summed before the norm. It looks at attention itself, so accumulated importance has no part in it.

    Attributes:
        window: the last queries that are looked at.
        space: "residual" (after W_O, the group summed) or "value" (before it, mean over the group's heads).
        norm: p of ‖·‖_p.
    """

    window: int = 8
    space: Literal["residual", "value"] = "residual"
    norm: Literal[1, 2] = 2

    source: ClassVar[str] = "CAOTE, arXiv 2504.14051"

    def __post_init__(self) -> None:
        whole("window", self.window, 1)
        one_of("space", self.space, "residual", "value")
        one_of("norm", self.norm, 1, 2)

    def scores(
        self,
        importance: Float[Tensor, "batch heads keys"],
        seen: Observation,
        protected: Bool[Tensor, "batch _ keys"],
        free: Bool[Tensor, "batch _ keys"],
    ) -> Scores:
        """The mean error over the window."""
        record, part = seen.record, slice(-self.window, None)
        weights, sink_mass, looking = seen.weights[:, :, part], seen.sink_mass[:, :, part], seen.looking[:, :, part]
        if self.space == "residual":
            blocks, level = record.projection_blocks, "group" if seen.n_kv_heads == record.n_kv_heads else "layer"
        else:
            width = record.values.shape[-1]
            blocks = torch.eye(width, device=weights.device, dtype=weights.dtype).expand(record.n_heads, width, width)
            level = "head"
        errors = single_eviction_error(weights, record.values, blocks, sink_mass, norm=self.norm, level=level)  # type: ignore[arg-type]
        mean = (errors * looking).sum(2) / looking.sum(2).clamp(min=1)
        return Scores(seen.grouped(mean) if level == "head" else mean, protected, free)


@dataclass(frozen=True)
class Defensive(OneRanking):
    """The worst case over the group, max(max_h A, mean over entries), times ‖v W_O‖ over its own mean.

    DefensiveKV (arXiv 2510.13334) with an accumulator that takes the maximum over the window: an entry that one query of one head needs once is
    kept. The floor, the head's mean, keeps entries that were never looked at comparable by their norm.

    Attributes:
        norm: p of ‖V W_O‖_p.
    """

    norm: Literal[1, 2] = 1

    source: ClassVar[str] = "DefensiveKV, arXiv 2510.13334"

    def __post_init__(self) -> None:
        one_of("norm", self.norm, 1, 2)

    def scores(
        self,
        importance: Float[Tensor, "batch heads keys"],
        seen: Observation,
        protected: Bool[Tensor, "batch _ keys"],
        free: Bool[Tensor, "batch _ keys"],
    ) -> Scores:
        """Floored worst case times the relative norm."""
        worst = seen.grouped(importance, "max")
        among = free.to(worst.dtype).expand_as(worst)
        floor = (worst * among).sum(-1, keepdim=True) / among.sum(-1, keepdim=True).clamp(min=1)
        return Scores(torch.maximum(worst, floor) * scaled(seen.grouped(seen.norms(self.norm))), protected, free)


@dataclass(frozen=True)
class RatioOptimum:
    """The exact minimiser of θ_o = (Σ_E A_i ‖ν_i − ō‖) / σ for the window's mean attention, by Dinkelbach's method (docs/theory.md, O2).

    Minimises that bound for one query of one head; over a window and a group it takes their mean attention and mean distances.
    It looks at attention itself, not at pooled importance. Ours.

    Attributes:
        window: the last queries whose mean attention counts.
        norm: p of ‖·‖_p.
    """

    window: int = 32
    norm: Literal[1, 2] = 1

    source: ClassVar[str] = "criticalkv, docs/theory.md O2"

    def __post_init__(self) -> None:
        whole("window", self.window, 1)
        one_of("norm", self.norm, 1, 2)

    def scores(
        self,
        importance: Float[Tensor, "batch heads keys"],
        seen: Observation,
        protected: Bool[Tensor, "batch _ keys"],
        free: Bool[Tensor, "batch _ keys"],
    ) -> Scores:
        """The group's mean attention and mean distances."""
        return Scores(seen.grouped(seen.window_mean(self.window)), protected, free, seen.grouped(seen.distances(self.norm)))

    def choose(self, scores: Scores, counts: Int[Tensor, "batch kv_heads"]) -> Decision:
        """The minimiser of each head's ratio."""
        assert scores.second is not None
        attention = scores.first.double()
        keep = torch.zeros_like(attention, dtype=torch.bool)
        may = (scores.free | scores.protected).expand_as(keep)
        must = scores.protected.expand_as(keep)
        sink = (1 - attention.sum(-1)).clamp(min=0)
        for count in counts.unique().tolist():
            if not count:  # a row of pads has nothing to keep
                continue
            rows = counts == count
            found = dinkelbach(
                attention[rows], scores.second[rows], count, sink[rows], protected=must[rows], candidates=may[rows]
            )
            keep[rows] = found.keep
        return Decision(keep)
