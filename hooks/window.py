"""The last queries of a pass: of each row, and none of them a pad."""

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """Which queries of a pass are kept: the last `count` positions, or `index` [batch, count] where rows are padded.

    `valid` [batch, count] is False where a row has fewer queries than the window.
    """

    count: int
    index: Tensor | None = None
    valid: Tensor | None = None

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """The window of `tensor` along `dim`, whose first dimension is the batch; copied where that lets go of the rest."""
        tensor = tensor.detach()
        length = tensor.shape[dim]
        if self.index is None:
            return tensor if self.count >= length else tensor.narrow(dim, length - self.count, self.count).clone()
        if length == 1 and self.count > 1:  # one row of a mask for all queries
            return tensor
        batch = self.index.shape[0]
        shape = [1] * tensor.dim()
        shape[0], shape[dim] = batch, self.count
        tensor = tensor.expand(batch, *tensor.shape[1:])
        target = list(tensor.shape)
        target[dim] = self.count
        return tensor.gather(dim, self.index.to(tensor.device).view(shape).expand(target))


def last_queries(padding: Tensor | None, batch: int, queries: int, wanted: int | None) -> Window:
    """The window of a pass of `queries` queries; `padding` [batch, tokens] is 1 at tokens and 0 at pads, the queries its last columns."""
    count = queries if wanted is None else min(wanted, queries)
    if padding is None or padding.shape[0] != batch or padding.shape[1] < queries:
        return Window(count)
    real = padding[:, -queries:].bool()
    if bool(real.all()):
        return Window(count)
    order = real.to(torch.int8).argsort(dim=1, stable=True)[:, -count:]  # pads first, then the tokens in order
    return Window(count, order, real.gather(1, order))


@dataclass
class Shared:
    """Slices by the tensor that they were cut from, so that layers that were given one tensor share one copy of its part.

    Holds no tensor alive but the slices, and those only as long as a record does.
    """

    held: dict[tuple[Hashable, ...], tuple[weakref.ref[object] | None, weakref.ref[Tensor]]] = field(default_factory=dict)

    def get(self, source: object, settings: tuple[Hashable, ...], cut: Callable[[], Tensor]) -> Tensor:
        """What `cut` makes of `source` under `settings`, or what it made of the same tensor before."""
        key = (id(source), *settings)
        if key in self.held:
            origin, part = self.held[key]
            known = part()
            if known is not None and (origin is None) == (source is None) and (origin is None or origin() is source):
                return known
        made = cut()
        self.held[key] = (None if source is None else weakref.ref(source), weakref.ref(made))
        return made
