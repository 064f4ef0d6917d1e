"""What a policy sees of one layer: what its attention used, and what follows from it, each computed once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from bounds.distances import projected_distances
from bounds.norms import projected_norms
from eviction.live import Sketch
from hooks.masks import seen
from hooks.records import LayerRecord
from perturbation.output import attention_output
from perturbation.weights import attention_weights


@dataclass(frozen=True)
class Observation:
    """A layer's record with its attention weights, norms and outputs at hand; several policies may look at one.

    Of a cache that lost entries before, the record's keys are those that it still holds; the rest of these fields says what the record
    cannot. Nothing given, the record is that of a whole prefill.

    Attributes:
        record: what attention used.
        known_norms: ‖V W_O‖_p by p, [batch, heads, 1, keys], where they were computed before.
        cached_heads: heads that the cache holds, where they are not the record's KV heads: 1 for latent attention, whose one latent
            all heads are expanded from.
        held: of how many of the last tokens seen the cache may hold entries, where a sliding window has dropped those before.
        slots: where each key stands among the tokens seen, ascending; −1 where there is none.
        lengths: entries that each row would have, had none been evicted: what a fractional budget is a fraction of.
        pads: tokens of each row that are pads, all at its start.
        carried: what earlier queries gave each entry, for an accumulator that adds up.
        nats: the KL of removing each entry, as the recorded queries have it (`eviction.replay`), for an accumulator that asks.
        sketch: what removals do along each of its directions, for a selection that asks.

    Raises:
        ValueError: `cached_heads` is neither 1 nor the KV heads, or `held` is below 1.
    """

    record: LayerRecord
    known_norms: Mapping[float, Float[Tensor, "batch heads 1 keys"]] = field(default_factory=dict)
    cached_heads: int | None = None
    held: int | None = None
    slots: Int[Tensor, "batch _ keys"] | None = None
    lengths: Int[Tensor, " batch"] | None = None
    pads: Int[Tensor, " batch"] | None = None
    carried: Float[Tensor, "batch heads keys"] | None = None
    nats: Float[Tensor, "batch cached_heads keys"] | None = None
    sketch: Sketch | None = None

    def __post_init__(self) -> None:
        if self.cached_heads not in (None, 1, self.record.n_kv_heads):
            raise ValueError(
                f"a cache of {self.cached_heads} heads does not fit attention with {self.record.n_kv_heads} KV heads in {self.record.name}"
            )
        if self.held is not None and self.held < 1:
            raise ValueError(f"the cache of {self.record.name} holds {self.held} entries; there is nothing to choose from")

    @property
    def n_kv_heads(self) -> int:
        """Heads that entries are chosen for: the cached ones."""
        return self.cached_heads or self.record.n_kv_heads

    @cached_property
    def _attention(self) -> tuple[Tensor, Tensor]:
        return attention_weights(**self.record.inputs)

    @property
    def weights(self) -> Float[Tensor, "batch heads queries keys"]:
        """A of the recorded queries."""
        return self._attention[0]

    @property
    def sink_mass(self) -> Float[Tensor, "batch heads queries"]:
        """a0 of the recorded queries."""
        return self._attention[1]

    @cached_property
    def valid(self) -> Bool[Tensor, "batch _ keys"]:
        """Entries that the last query sees and that are held: no pads, nothing that a sliding window has left behind, no gaps. One row for
        all KV heads where they hold the same.
        """
        last = seen(self.record.mask)[:, :, -1]
        valid = last if last.shape[1] == 1 else last.unflatten(1, (self.n_kv_heads, -1)).any(2)
        valid = valid & self.record.query_valid[:, -1, None, None]  # a row without any token has none
        if self.held is None:
            return valid
        return valid & (self.places >= self.places.amax() + 1 - self.held)

    @cached_property
    def places(self) -> Int[Tensor, "batch _ keys"]:
        """`slots`, written out: 0, 1, … where nothing was evicted before."""
        if self.slots is not None:
            return self.slots.long()
        return torch.arange(self.record.n_keys, device=self.record.keys.device).expand(self.record.keys.shape[0], 1, -1)

    @property
    def own_places(self) -> Int[Tensor, "batch _ keys"]:
        """`places`, counted from each row's first token that is no pad: the same whatever the row is batched with."""
        return self.places if self.pads is None else self.places - self.pads[:, None, None]

    @property
    def rows_entries(self) -> Int[Tensor, " batch"]:
        """`lengths`, written out: the valid entries where nothing was evicted before."""
        return self.valid.sum(-1).amax(1) if self.lengths is None else self.lengths

    @cached_property
    def looking(self) -> Float[Tensor, "batch 1 queries 1"]:
        """1 for a recorded query that is no pad, else 0."""
        return self.record.query_valid[:, None, :, None].to(self.weights.dtype)

    def window_mean(self, count: int) -> Float[Tensor, "batch heads keys"]:
        """Mean of A over the last `count` queries, pads apart."""
        looking = self.looking[:, :, -count:]
        # a product: nothing of that size is made; 0 for a row without any token
        return (looking.mT @ self.weights[:, :, -count:]).squeeze(2) / looking.sum(2).clamp(min=1)

    def window_max(self, count: int) -> Float[Tensor, "batch heads keys"]:
        """Maximum of A over the last `count` queries, pads apart."""
        return (self.weights[:, :, -count:] * self.looking[:, :, -count:]).amax(2)

    def norms(self, norm: float = 1) -> Float[Tensor, "batch heads keys"]:
        """‖v_i W_h‖_p, without a gate: that differs from query to query and is not known for the queries to come."""
        cache = self.__dict__.setdefault("_norms", dict(self.known_norms))
        if norm not in cache:
            cache[norm] = projected_norms(self.record.values, self.record.projection_blocks, norm=norm)
        return cache[norm][:, :, 0]

    def distances(self, norm: float = 1) -> Float[Tensor, "batch heads keys"]:
        """‖ν_i − ō‖_p, ō the mean of the recorded queries' outputs."""
        cache = self.__dict__.setdefault("_distances", {})
        if norm not in cache:
            outputs = attention_output(self.weights, self.record.values) * self.looking
            centre = outputs.sum(2, keepdim=True) / self.looking.sum(2, keepdim=True).clamp(min=1)
            cache[norm] = projected_distances(self.record.values, self.record.projection_blocks, centre, norm=norm)[:, :, 0]
        return cache[norm]

    def per_head(self, per_kv_head: Shaped[Tensor, "batch kv_heads last"]) -> Shaped[Tensor, "batch _ last"]:
        """A number or mask of each cached KV head for each of its query heads; one row for all stays one."""
        if per_kv_head.shape[1] == 1:
            return per_kv_head
        return per_kv_head.repeat_interleave(self.record.n_heads // per_kv_head.shape[1], 1)

    def grouped(self, per_head: Float[Tensor, "batch heads keys"], how: str = "mean") -> Float[Tensor, "batch kv_heads keys"]:
        """Over the heads that share a cached KV head: "mean" or "max"."""
        apart = per_head.unflatten(1, (self.n_kv_heads, -1))
        return apart.mean(2) if how == "mean" else apart.amax(2)


def recent(valid: Bool[Tensor, "*batch keys"], count: Tensor | int) -> Bool[Tensor, "*batch keys"]:
    """The last `count` valid entries of each row; one count for all or one a row."""
    from_end = valid.flip(-1).cumsum(-1).flip(-1)
    limit = count[..., None] if isinstance(count, Tensor) else count
    return valid & (from_end <= limit)


def earliest(valid: Bool[Tensor, "*batch keys"], count: Tensor | int) -> Bool[Tensor, "*batch keys"]:
    """The first `count` valid entries of each row; one count for all or one a row."""
    limit = count[..., None] if isinstance(count, Tensor) else count
    return valid & (valid.cumsum(-1) <= limit)
