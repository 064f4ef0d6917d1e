"""A cache that holds the kept entries and nothing else, for masks that keep the same number in every head and layer."""

from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class CompressedLayer(DynamicLayer):
    """What every layer that lost entries has in common: tokens written since can be taken back, and nothing else.

    `kept` of the entries in `keys` are the prompt's; those after them were written since.
    """

    kept: int = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last −`tokens_to_remove` tokens, as far as they were written after the eviction.

        Raises:
            ValueError: it would reach into the compressed prompt, whose dropped entries are gone.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the negative of the number of tokens to take back, not {tokens_to_remove}")
        assert self.keys is not None
        written = self.keys.shape[-2] - self.kept
        if -tokens_to_remove > written:
            raise ValueError(
                f"cannot take back {-tokens_to_remove} tokens: only {written} were written after the eviction, and the "
                "entries dropped from the prompt are gone; prefill the shorter prompt instead"
            )
        # not DynamicLayer's: releases differ in what they take, and count by get_seq_length, which here includes what was dropped
        assert self.values is not None
        held = self.keys.shape[-2] + min(tokens_to_remove, 0)
        self.keys, self.values = self.keys[..., :held, :], self.values[..., :held, :]

    def reset(self) -> None:
        """Not possible: an evicted layer without its entries is nothing.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("an evicted cache cannot be reset to empty; make a new DynamicCache and prefill again")


class EvictedLayer(CompressedLayer):
    """One layer's kept entries, and how many were dropped before them.

    It says that it is as long as what was seen (`get_seq_length`), so that positions go on where the prompt ended, and that
    it holds what it holds (`get_mask_sizes`): kept entries stand in front of what comes, all visible to it.
    """

    def __init__(
        self,
        keys: Float[Tensor, "batch kv_heads kept head_dim"],
        values: Float[Tensor, "batch kv_heads kept value_dim"],
        dropped: int,
    ) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.dropped = dropped
        self.kept = keys.shape[-2]

    def get_seq_length(self) -> int:
        """Tokens seen: those held and those dropped."""
        assert self.keys is not None
        return self.keys.shape[-2] + self.dropped

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that attention will see, and the position at which they begin to count."""
        return self.get_seq_length() - self.dropped + query_length, self.dropped


def uniform_layer(keys: Tensor, values: Tensor, keep: Tensor) -> EvictedLayer:
    """The kept entries of each row and head, as many in all of them, in ascending order."""
    kept = int(keep[0, 0].sum())
    # nonzero walks each row in order, so kept entries stay ascending
    where = keep.nonzero(as_tuple=True)[2].view(*keep.shape[:2], kept, 1)
    return EvictedLayer(
        keys.gather(2, where.expand(-1, -1, -1, keys.shape[-1])),
        values.gather(2, where.expand(-1, -1, -1, values.shape[-1])),
        keys.shape[2] - kept,
    )
