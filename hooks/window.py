"""The last queries of a pass: of each row, and none of them a pad."""

import weakref
from dataclasses import dataclass

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
        return released(self.part(tensor, dim))

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """`take`, as a view of `tensor` where there is one."""
        tensor = tensor.detach()
        length = tensor.shape[dim]
        if self.index is None:
            return tensor if self.count >= length else tensor.narrow(dim, length - self.count, self.count)
        if length == 1 and self.count > 1:  # one row of a mask for all queries
            return tensor
        batch = self.index.shape[0]
        shape = [1] * tensor.dim()
        shape[0], shape[dim] = batch, self.count
        tensor = tensor.expand(batch, *tensor.shape[1:])
        target = list(tensor.shape)
        target[dim] = self.count
        return tensor.gather(dim, self.index.to(tensor.device).view(shape).expand(target))


def released(part: Tensor) -> Tensor:
    """`part`, copied where it is a piece of something larger that it would keep alive."""
    return part if part.untyped_storage().nbytes() <= part.numel() * part.element_size() else part.clone()


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


class Shared:
    """One copy of tensors that are equal, so that layers which were given the same thing do not each keep their own.

    Holds nothing alive: a copy lives as long as a record has it.
    """

    def __init__(self) -> None:
        self._held: list[weakref.ref[Tensor]] = []

    def __call__(self, part: Tensor) -> Tensor:
        """The tensor equal to `part` that is still in use, or else `part`, released from what it is a view of."""
        alive = [tensor for reference in self._held if (tensor := reference()) is not None]
        for tensor in alive:
            if tensor.dtype == part.dtype and tensor.device == part.device and torch.equal(tensor, part):
                return tensor
        kept = released(part)
        self._held = [weakref.ref(tensor) for tensor in (*alive[-1:], kept)]  # two: sliding and full layers take turns
        return kept
