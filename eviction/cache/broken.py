"""Layers of a cache that was left half done: whatever uses them is told so."""

from typing import Any, NoReturn

from transformers.cache_utils import Cache, DynamicLayer


class BrokenLayer(DynamicLayer):
    """Holds nothing, and says why at every use."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Never returns.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"this cache cannot be used any more: {self.why}. Prefill a new one")

    update = crop = reset = reorder_cache = batch_repeat_interleave = batch_select_indices = refuse  # type: ignore[assignment]
    get_seq_length = get_mask_sizes = get_max_length = get_max_cache_shape = refuse  # type: ignore[assignment]


def break_cache(cache: Cache, why: str) -> None:
    """Let go of all that `cache` holds; it says `why` from now on."""
    cache.layers[:] = [BrokenLayer(why) for _ in cache.layers]
