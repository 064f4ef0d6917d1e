"""A cache layer that holds the kept entries and nothing else, for masks that keep the same number in every head and layer."""

from jaxtyping import Float, Int
from torch import Tensor

from eviction.cache.compressed import CompressedLayer


class EvictedLayer(CompressedLayer):
    """One layer's kept entries, and how many were dropped before them.

    It says that it is as long as what was seen (`get_seq_length`), so that positions go on where the prompt ended, and that
    it holds what it holds (`get_mask_sizes`): kept entries stand in front of what comes, all visible to it. `slots` are their true places.
    """

    def __init__(
        self,
        keys: Float[Tensor, "batch kv_heads kept head_dim"],
        values: Float[Tensor, "batch kv_heads kept value_dim"],
        slots: Int[Tensor, "batch kv_heads kept"],
        dropped: int,
    ) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.slots = keys, values, slots
        self.dropped = dropped
        self.kept = keys.shape[-2]

    def get_seq_length(self) -> int:
        """Tokens seen: those held and those dropped."""
        assert self.keys is not None
        return self.keys.shape[-2] + self.dropped

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that attention will see, and the position at which they begin to count."""
        return self.get_seq_length() - self.dropped + query_length, self.dropped

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The rows that `beam_idx` names, in its order."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.slots = self.slots.index_select(0, beam_idx.to(self.slots.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self.slots = self.slots.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows `indices`."""
        super().batch_select_indices(indices)
        self.slots = self.slots[indices, ...]


def uniform_layer(keys: Tensor, values: Tensor, keep: Tensor) -> EvictedLayer:
    """The kept entries of each row and head, as many in all of them, in ascending order."""
    kept = int(keep[0, 0].sum())
    # nonzero walks each row in order, so kept entries stay ascending
    where = keep.nonzero(as_tuple=True)[2].view(*keep.shape[:2], kept)
    return EvictedLayer(
        keys.gather(2, where[..., None].expand(-1, -1, -1, keys.shape[-1])),
        values.gather(2, where[..., None].expand(-1, -1, -1, values.shape[-1])),
        where.int(),
        keys.shape[2] - kept,
    )
