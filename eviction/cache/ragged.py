"""A cache layer whose KV heads hold different numbers of entries, flat, so that the bytes held are the bytes kept.

Each kept entry knows its slot, the place that it had among everything seen, so that any mask (sliding, chunked, padded) is right for it.
Attention that reads the layer runs inside `with eviction.reading(model)`; anything else that touches what it hands out is told so.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from eviction.cache.compressed import CompressedLayer
from eviction.cache.recent import Remembering
from eviction.cache.states import LatentStates, RaggedStates


class RaggedLayer(Remembering, CompressedLayer):
    """One layer: kept entries of each row and KV head one after the other, and a dense tail of what was written since.

    `kept_keys` [entries, head_dim], `kept_values` and `slots` hold head k of row b at `spans[b][k]`. It says that it is as long as what was
    seen, and asks for a mask over all of that, of which each head takes the columns of its slots. With a `window` (a sliding layer) entries
    that no query to come can see are dropped as it slides. `latent`: the model makes keys and values of what is cached before attention (MLA,
    one cached head for all). `carried` [entries, readers · group], where a policy adds up, is what earlier queries gave each kept entry.
    """

    def __init__(
        self,
        keys: Float[Tensor, "batch kv_heads held head_dim"],
        values: Float[Tensor, "batch kv_heads held value_dim"],
        keep: Bool[Tensor, "batch kv_heads held"],
        *,
        slots: Int[Tensor, "batch _ held"] | None = None,
        seen: int | None = None,
        window: int | None = None,
        latent: bool = False,
        carried: Float[Tensor, "batch kv_heads held each"] | None = None,
    ) -> None:
        """Keep what `keep` keeps of entries that stand at `slots` (by default 0, 1, …) of the `seen` tokens."""
        super().__init__()
        self.seen = keys.shape[2] if seen is None else seen
        self.start = self.seen
        self.window, self.latent, self.record_past = window, latent, False
        self.is_sliding = window is not None
        self.lazy_initialization(keys[:, :, :0], values[:, :, :0])
        self.keys, self.values = (part.new_empty(*part.shape[:2], 0, part.shape[3]) for part in (keys, values))
        # boolean indexing walks rows, heads and entries in order: kept entries stay ascending
        self.kept_keys, self.kept_values = keys[keep], values[keep]
        places = torch.arange(keys.shape[2], device=keys.device) if slots is None else slots
        self.slots = places.to(torch.int32).expand(keep.shape)[keep]
        self.carried = None if carried is None else carried[keep]
        self.count(keep.sum(-1).tolist())

    def count(self, counts: list[list[int]]) -> None:
        """`counts[b][k]` entries are kept of head k in row b; the flat tensors hold them in that order."""
        self.counts, self.spans, end = counts, [], 0
        for row in counts:
            spans = []
            for count in row:
                spans.append(slice(end, end + count))
                end += count
            self.spans.append(spans)
        self._offsets = None

    @property
    def offsets(self) -> Int[Tensor, " ends"]:
        """Where the entries of each row and KV head begin in the flat tensors, and where the last ones end; made once."""
        if self._offsets is None:
            ends = [0, *(span.stop for row in self.spans for span in row)]
            self._offsets = torch.tensor(ends, dtype=torch.int32, device=self.slots.device)
        return self._offsets

    _offsets: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append to the tail; attention gets states that know this layer."""
        assert self.keys is not None
        assert self.values is not None
        if not self.record_past:
            self._slide()
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        if self.latent:
            keys, values = self.dense()
            return LatentStates.of(keys, self), LatentStates.of(values, self)
        return RaggedStates.of(self.keys, self), RaggedStates.of(self.values, self)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads side by side [batch, kv_heads, longest, ·]: kept entries, then gaps, then what was written since."""
        assert self.keys is not None
        assert self.values is not None
        there, dense = self._there(), []
        for kept, since in ((self.kept_keys, self.keys), (self.kept_values, self.values)):
            part = kept.new_zeros(*there.shape, kept.shape[-1])
            part[there] = kept
            dense.append(torch.cat([part, since], 2))
        return dense[0], dense[1]

    def dense_slots(self) -> Tensor:
        """The slots of what `dense` holds [batch, kv_heads, longest]; −1 in a gap."""
        assert self.keys is not None
        there = self._there()
        tail = torch.arange(self.start, self.get_seq_length(), device=self.slots.device, dtype=self.slots.dtype)
        slots = self.slots.new_full(there.shape, -1)
        slots[there] = self.slots
        return torch.cat([slots, tail.expand(*there.shape[:2], -1)], 2)

    def dense_carried(self) -> Tensor | None:
        """What `dense` entries were given before [batch, kv_heads, longest, each]; 0 in a gap and for what was written since."""
        if self.carried is None:
            return None
        assert self.keys is not None
        there = self._there()
        part = self.carried.new_zeros(*there.shape, self.carried.shape[-1])
        part[there] = self.carried
        return functional.pad(part, (0, 0, 0, self.keys.shape[2]))

    def _there(self) -> Tensor:
        """Which places of the kept entries side by side are filled."""
        counts = torch.tensor(self.counts, device=self.slots.device)[..., None]
        return torch.arange(max(max(row) for row in self.counts), device=self.slots.device) < counts

    def _slide(self) -> None:
        """Drop what no query to come can see: entries a window or more behind the next one. Kept ones a part of a window at a time."""
        if self.window is None:
            return
        oldest = self.get_seq_length() - self.window + 1
        assert self.keys is not None
        assert self.values is not None
        if (over := min(oldest - self.start, self.keys.shape[2])) > 0:
            self.keys, self.values = self.keys[:, :, over:].clone(), self.values[:, :, over:].clone()
            self.start += over
        if len(self.slots) and oldest >= min(self.seen, self._checked + max(self.window // 8, 1)):
            self._checked = oldest
            left = self.slots >= oldest
            counts = [[int(left[span].sum()) for span in row] for row in self.spans]
            self._take(left)
            self.count(counts)

    _checked: int = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last −`tokens_to_remove` tokens, as far as they were written after the eviction.

        Raises:
            ValueError: it would reach into the compressed prompt, or behind a window that has slid (`activate_past_recording` keeps more).
        """
        if self.window is not None and tokens_to_remove < 0:
            needed = self.get_seq_length() + tokens_to_remove - self.window + 1
            if needed < max(self.start if self.start > self.seen else 0, self._checked):
                raise ValueError(
                    f"cannot take back {-tokens_to_remove} tokens: the sliding window of {self.window} has dropped entries that would be seen "
                    "again; call cache.activate_past_recording() before they are written"
                )
        super().crop(tokens_to_remove)
        self._slide()

    def activate_past_recording(self) -> None:
        """Let the window slide only in `crop`, so that tokens can be taken back."""
        self.record_past = True

    def get_seq_length(self) -> int:
        """Tokens seen: the prompt's and those written since."""
        assert self.keys is not None
        return self.start + self.keys.shape[-2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask is needed for, and the position at which they begin: everything seen."""
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The rows that `beam_idx` names, in its order."""
        rows = beam_idx.tolist()
        where = [torch.arange(span.start, span.stop) for row in rows for span in self.spans[row]]
        index = torch.cat(where).to(self.slots.device)
        assert self.keys is not None
        assert self.values is not None
        self._take(index)
        self.keys, self.values = (part[beam_idx.to(part.device)] for part in (self.keys, self.values))
        self.count([self.counts[row] for row in rows])
        self.recall_rows(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def _take(self, index: Tensor) -> None:
        """Of the kept entries those at `index`."""
        self.kept_keys, self.kept_values, self.slots = self.kept_keys[index], self.kept_values[index], self.slots[index]
        if self.carried is not None:
            self.carried = self.carried[index]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self.reorder_cache(torch.arange(len(self.counts)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows `indices`."""
        rows = torch.arange(len(self.counts))
        self.reorder_cache(rows[indices.cpu() if isinstance(indices, Tensor) else indices])
