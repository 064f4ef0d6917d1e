"""The last queries that a cache has seen, which it carries along for policies that choose again while few are to come."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)


@dataclass(frozen=True)
class Recent:
    """The last queries of each row, in order, and which slots each could see.

    `queries` [batch, heads, queries, head_dim] has a tensor for each attention call that reads the layer's entries (several where
    layers share them), `sinks` [batch, heads, queries] that of the calls whose sinks differ from query to query. `spans`
    [batch, queries, 2] are the first and the last slot that a query could see; of a query that is a pad the last lies before the first.
    `tokens` [batch, queries] are what they are of, where that is known. Nothing is ever written in place.
    """

    queries: Mapping[int, Float[Tensor, "batch heads queries head_dim"]]
    spans: Int[Tensor, "batch queries 2"]
    sinks: Mapping[int, Float[Tensor, "batch heads queries"]] = field(default_factory=dict)
    tokens: Int[Tensor, "batch queries"] | None = None

    @property
    def count(self) -> int:
        """Queries held."""
        return self.spans.shape[1]

    def followed_by(self, later: "Recent", limit: int | None) -> "Recent":
        """These and `later` ones, the last `limit` of them."""
        left = self.count if limit is None else min(max(limit - later.count, 0), self.count)
        if not left:
            return later if limit is None or later.count <= limit else later.part(slice(-limit, None))
        first = self.count - left
        return Recent(
            {reader: torch.cat([self.queries[reader][:, :, first:], part], 2) for reader, part in later.queries.items()},
            torch.cat([self.spans[:, first:], later.spans], 1),
            {reader: torch.cat([self.sinks[reader][:, :, first:], part], 2) for reader, part in later.sinks.items()},
            None if self.tokens is None or later.tokens is None else torch.cat([self.tokens[:, first:], later.tokens], 1),
        )

    def part(self, which: slice) -> "Recent":
        """Some of the queries, in tensors of their own."""
        return Recent(
            {reader: part[:, :, which].clone() for reader, part in self.queries.items()},
            self.spans[:, which].clone(),
            {reader: part[:, :, which].clone() for reader, part in self.sinks.items()},
            None if self.tokens is None else self.tokens[:, which].clone(),
        )

    def rows(self, change: Callable[[Tensor], Tensor]) -> "Recent":
        """With other rows of the batch."""
        return Recent(
            {reader: change(part) for reader, part in self.queries.items()},
            change(self.spans),
            {reader: change(part) for reader, part in self.sinks.items()},
            None if self.tokens is None else change(self.tokens),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All that it is made of."""
        tokens = [] if self.tokens is None else [self.tokens]
        return [*self.queries.values(), self.spans, *self.sinks.values(), *tokens]


class Remembering:
    """What a cache layer needs to carry `recent` queries through all that is done with a cache; stands before the layer's own class."""

    recent: Recent | None = None
    looked: int = 0
    """Tokens seen when a policy last looked."""

    def crop(self, tokens_to_remove: int) -> None:
        """As the layer's own; queries of what is taken back are forgotten, and those that they had replaced do not come back."""
        before = self.get_seq_length()  # type: ignore[attr-defined]
        super().crop(tokens_to_remove)  # type: ignore[misc, override]
        gone = before - self.get_seq_length()  # type: ignore[attr-defined]
        self.looked = min(self.looked, before - gone)
        if self.recent is not None and gone:
            left = self.recent.count - gone
            self.recent = self.recent.part(slice(0, left)) if left > 0 else None

    def reset(self) -> None:
        """As the layer's own; what was seen is forgotten."""
        super().reset()  # type: ignore[misc]
        self.recent, self.looked = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The rows that `beam_idx` names, in its order."""
        super().reorder_cache(beam_idx)  # type: ignore[misc, override]
        self.recall_rows(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc, override]
        self.recall_rows(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows `indices`."""
        super().batch_select_indices(indices)  # type: ignore[misc, override]
        self.recall_rows(lambda part: part[indices, ...])

    def recall_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """The queries of other rows of the batch."""
        if self.recent is not None:
            self.recent = self.recent.rows(change)


class WatchedLayer(Remembering, DynamicLayer):
    """A stock layer of full attention that carries its recent queries."""


class WatchedSlidingLayer(Remembering, DynamicSlidingWindowLayer):
    """A stock layer of sliding attention that carries its recent queries."""


class WatchedHybridLayer(Remembering, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """A stock layer of full attention beside a linear state that carries its recent queries."""


WATCHED: dict[type, type] = {
    DynamicLayer: WatchedLayer,
    DynamicSlidingWindowLayer: WatchedSlidingLayer,
    LinearAttentionAndFullAttentionLayer: WatchedHybridLayer,
}


def watched(layer: Any) -> Any:
    """The layer, its tensors shared, as one that carries its recent queries; any that does already, or holds no entries, as it is."""
    if (cls := WATCHED.get(type(layer))) is None:
        return layer
    made: Any = object.__new__(cls)
    vars(made).update(vars(layer))
    return made
