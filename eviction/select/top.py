"""The highest scores first, ties by position: the one place where scores become a choice."""

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor


def top(scores: Shaped[Tensor, "*batch entries"], count: int) -> Bool[Tensor, "*batch entries"]:
    """The `count` highest scores of each row; of equal scores the earlier entry wins, on every machine.

    Raises:
        ValueError: `count` is negative or more than there are entries, or a score is NaN.
    """
    entries = scores.shape[-1]
    if not 0 <= count <= entries:
        raise ValueError(f"cannot keep {count} of {entries} entries")
    if scores.is_floating_point() and bool(scores.isnan().any()):
        raise ValueError(f"{int(scores.isnan().sum())} scores are NaN: the model's attention or values are not finite")
    order = scores.argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter_(-1, order[..., :count], True)
