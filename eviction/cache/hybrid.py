"""A layer that holds a linear-attention state beside its entries: the state stays as it is, the entries are compressed."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from eviction.cache.ragged import RaggedLayer
from eviction.cache.uniform import EvictedLayer


class HybridLayer(LinearAttentionAndFullAttentionLayer):
    """What transformers' layer of that kind is, with compressed `entries` in place of its keys and values."""

    def __init__(self, state: LinearAttentionAndFullAttentionLayer, entries: EvictedLayer | RaggedLayer) -> None:
        """Take over the linear state of `state`, its tensors as they are."""
        left = ("keys", "values", "entries", "recent", "looked")
        vars(self).update({name: value for name, value in vars(state).items() if name not in left})
        self.entries = entries

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Those of the entries."""
        return self.entries.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Those of the entries."""
        return self.entries.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """To the entries."""
        return self.entries.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.entries.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As the entries ask."""
        return self.entries.get_mask_sizes(query_length)

    def crop(self, tokens_to_remove: int) -> None:
        """Entries are taken back only where the state can be.

        Raises:
            ValueError: the state has no past to go back to.
        """
        if tokens_to_remove < 0 and not getattr(self, "is_croppable", False):
            raise ValueError(
                f"cannot take back {-tokens_to_remove} tokens: the layer's recurrent state has gone on and cannot go back"
            )
        self.entries.crop(tokens_to_remove)
        LinearAttentionLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Not possible, as for every compressed layer."""
        self.entries.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The rows that `beam_idx` names, in its order."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        self.entries.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._states(lambda state: state.repeat_interleave(repeats, dim=0))
        self.entries.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows `indices`."""
        self._states(lambda state: state[indices])
        self.entries.batch_select_indices(indices)

    def _states(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in ("conv_states", "recurrent_states"):
            states: Any = getattr(self, name)  # one, or several by their index, with releases
            if isinstance(states, dict):
                states.update({index: change(state) for index, state in states.items() if state is not None})
            elif states is not None:
                setattr(self, name, change(states))


def entries_of(layer: Any) -> Any:
    """The part of a cache layer that holds entries: the layer itself, but for one that has a linear state beside compressed ones."""
    return layer.entries if isinstance(layer, HybridLayer) else layer


def has_linear_states(cache: Cache) -> bool:
    """Whether a layer of the cache holds a state that every token changes for good."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
