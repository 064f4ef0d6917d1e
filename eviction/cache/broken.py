"""A cache that a pass or an eviction left half done: taken back to what it was, or made to say so at its next use."""

from dataclasses import dataclass
from typing import Any, NoReturn

from transformers.cache_utils import Cache, DynamicLayer

from eviction.cache.hybrid import entries_of, has_linear_states


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


@dataclass(frozen=True)
class Before:
    """What a cache was before a pass: the tokens that each layer had seen, and sliding layers as they were, which cannot be cropped."""

    lengths: tuple[int, ...]
    sliding: dict[int, dict[str, Any]]

    @classmethod
    def of(cls, cache: Cache) -> "Before":
        """`cache` as it is; nothing is copied."""
        entries = [entries_of(layer) for layer in cache.layers]
        sliding = {place: dict(vars(layer)) for place, layer in enumerate(entries) if hasattr(layer, "sliding_window")}
        return cls(tuple(map(length_of, entries)), sliding)


def length_of(layer: Any) -> int:
    """Tokens that a layer has seen; 0 where it holds no entries."""
    return layer.get_seq_length() if getattr(layer, "keys", None) is not None else 0


def take_back(cache: Any, before: Before) -> None:
    """`cache` as it was `before`; where it has linear states, which cannot go back, it says so from now on."""
    if any(isinstance(layer, BrokenLayer) for layer in cache.layers):
        return
    if has_linear_states(cache):
        break_cache(cache, "a pass was interrupted, and its linear states cannot go back")
        return
    del cache.layers[len(before.lengths) :]
    for place, (layer, length) in enumerate(zip(cache.layers, before.lengths, strict=True)):
        if place in before.sliding:
            vars(layer).clear()
            vars(layer).update(before.sliding[place])
        elif (over := length_of(layer) - length) > 0:
            known = {name: vars(layer)[name] for name in ("recent", "looked") if name in vars(layer)}
            layer.crop(-over)
            vars(layer).update(known)  # what the pass saw was not noted yet
