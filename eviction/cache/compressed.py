"""What every cache layer that lost entries has in common."""

from torch import Tensor
from transformers.cache_utils import DynamicLayer

ASSISTED = "assisted decoding takes back what was guessed wrongly: it needs a cache that nothing is evicted from"


class CompressedLayer(DynamicLayer):
    """Tokens written since the eviction can be taken back, and nothing else; positions go on where the prompt ended.

    Slots count what was seen, from 0, pads and dropped entries among it. `kept` of the entries in `keys` are the prompt's; those after them
    were written since.
    """

    kept: int = 0
    slots: Tensor

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last −`tokens_to_remove` tokens, as far as they were written after the eviction.

        Raises:
            ValueError: it would reach into the compressed prompt, whose dropped entries are gone.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the negative of the number of tokens to take back, not {tokens_to_remove} ({ASSISTED})"
            )
        assert self.keys is not None
        written = self.keys.shape[-2] - self.kept
        if -tokens_to_remove > written:
            raise ValueError(
                f"cannot take back {-tokens_to_remove} tokens: only {written} were written after the eviction, and the "
                f"entries dropped from the prompt are gone; prefill the shorter prompt instead ({ASSISTED})"
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
