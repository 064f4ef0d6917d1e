"""A cache layer that holds the kept entries and nothing else, for masks that keep the same number in every head and layer."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from eviction.cache.compressed import CompressedLayer
from eviction.cache.recent import Remembering


class EvictedLayer(Remembering, CompressedLayer):
    """One layer's kept entries, and how many were dropped before them.

    It says that it is as long as what was seen (`get_seq_length`), so that positions go on where the prompt ended, and that
    it holds what it holds (`get_mask_sizes`): kept entries stand in front of what comes, all visible to it. `slots` are their true places.
    `carried` [batch, kv_heads, kept, readers · group], where a policy adds up, is what earlier queries gave each.
    """

    def __init__(
        self,
        keys: Float[Tensor, "batch kv_heads kept head_dim"],
        values: Float[Tensor, "batch kv_heads kept value_dim"],
        slots: Int[Tensor, "batch kv_heads kept"],
        dropped: int,
        carried: Float[Tensor, "batch kv_heads kept each"] | None = None,
    ) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.slots = keys, values, slots
        self.dropped, self.carried = dropped, carried
        self.kept = keys.shape[-2]

    def get_seq_length(self) -> int:
        """Tokens seen: those held and those dropped."""
        assert self.keys is not None
        return self.keys.shape[-2] + self.dropped

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that attention will see, and the position at which they begin to count."""
        return self.get_seq_length() - self.dropped + query_length, self.dropped

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, kv_heads, held, ·]."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def dense_slots(self) -> Tensor:
        """Their slots [batch, kv_heads, held]: those of kept entries, then those written since."""
        seen = self.get_seq_length()
        tail = torch.arange(self.kept + self.dropped, seen, device=self.slots.device, dtype=self.slots.dtype)
        return torch.cat([self.slots, tail.expand(*self.slots.shape[:2], -1)], 2)

    def dense_carried(self) -> Tensor | None:
        """What they were given before [batch, kv_heads, held, each]; 0 for what was written since."""
        if self.carried is None:
            return None
        assert self.keys is not None
        return functional.pad(self.carried, (0, 0, 0, self.keys.shape[2] - self.kept))

    def recall_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """What is known of the rows, beside their entries."""
        super().recall_rows(change)
        self.slots = change(self.slots)
        self.carried = None if self.carried is None else change(self.carried)


def uniform_layer(
    keys: Float[Tensor, "batch kv_heads held head_dim"],
    values: Float[Tensor, "batch kv_heads held value_dim"],
    keep: Bool[Tensor, "batch kv_heads held"],
    slots: Int[Tensor, "batch _ held"],
    seen: int,
    carried: Float[Tensor, "batch kv_heads held each"] | None = None,
) -> EvictedLayer:
    """The kept entries of each row and head, as many in all of them, in ascending order, of entries at `slots` of the `seen` tokens."""
    kept = int(keep[0, 0].sum())
    # nonzero walks each row in order, so kept entries stay ascending
    where = keep.nonzero(as_tuple=True)[2].view(*keep.shape[:2], kept)

    def taken(part: Tensor) -> Tensor:
        return part.gather(2, where[..., None].expand(-1, -1, -1, part.shape[-1]))

    places = slots.int().expand(keep.shape).gather(2, where)
    return EvictedLayer(taken(keys), taken(values), places, seen - kept, None if carried is None else taken(carried))
