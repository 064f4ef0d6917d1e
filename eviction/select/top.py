"""The highest scores first, ties by position: the one place where scores become a choice."""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def top(scores: Shaped[Tensor, "*batch entries"], count: int) -> Bool[Tensor, "*batch entries"]:
    """The `count` highest scores of each row; of equal scores the earlier entry wins, on every machine.

    Raises:
        ValueError: `count` is negative or more than there are entries, or a score is NaN.
    """
    entries = scores.shape[-1]
    if not 0 <= count <= entries:
        raise ValueError(f"cannot keep {count} of {entries} entries")
    everything = torch.ones_like(scores, dtype=torch.bool)
    counts = torch.full(scores.shape[:-1], count, device=scores.device)
    return best(scores, counts, ~everything, everything)


def best(
    scores: Shaped[Tensor, "*batch entries"],
    counts: Int[Tensor, "*batch"],
    first: Bool[Tensor, "*#batch entries"],
    among: Bool[Tensor, "*#batch entries"],
) -> Bool[Tensor, "*batch entries"]:
    """`counts` entries of each row: those of `first`, then the highest scores of `among`; never one outside of both.

    Raises:
        ValueError: a score is NaN, or a row has fewer entries than it should keep.
    """
    if scores.is_floating_point() and bool((broken := scores.isnan() & among).any()):
        raise ValueError(f"{int(broken.sum())} scores are NaN: the model's attention or values are not finite")
    rank = torch.where(first, 2, torch.where(among, 1, 0)).expand_as(scores)
    if bool((short := counts > (rank > 0).sum(-1)).any()):
        raise ValueError(f"cannot keep {counts[short].tolist()} entries where there are {(rank > 0).sum(-1)[short].tolist()}")
    order = scores.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, rank.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    within = torch.arange(scores.shape[-1], device=scores.device) < counts[..., None]
    return torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, order, within)


def scaled(scores: Float[Tensor, "*batch entries"]) -> Float[Tensor, "*batch entries"]:
    """Divided by the row's mean, so that rows of different units may be compared; a row of zeros stays."""
    mean = scores.mean(-1, keepdim=True)
    return scores / mean.where(mean > 0, 1)
