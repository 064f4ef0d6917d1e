"""Random signs over the vocabulary, and the directions in the logits along which they measure the Fisher information."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from scipy.linalg import hadamard
from torch import Tensor

Path = Literal["model", "layer", "residual"]


@dataclass(frozen=True)
class Asked:
    """How a removal's KL is estimated: `signs` draws seeded by `seed`, carried from the logits back along `path`.

    "model" is the whole model above the attention output. The others take what lies between as the identity: "layer" all layers above the one
    that attends, "residual" its own MLP too, so that a change ν of W_O's output arrives as it is at the final norm.
    """

    signs: int
    seed: int = 0
    path: Path = "model"


def directions(
    logits: Float[Tensor, "batch queries vocabulary"], asked: Asked, first: int
) -> Float[Tensor, "signs batch queries vocabulary"]:
    """∂(Σ_y √p_y ε_y log p_y) / ∂z = √p ⊙ ε − p Σ_y √p_y ε_y, p held constant, for each draw of signs; `first` is the first query's number.

    Their mean outer product is diag p − ppᵀ in expectation, the Fisher information about the logits.
    """
    p = logits.to(torch.promote_types(torch.float32, logits.dtype)).softmax(-1)
    seeds = [asked.seed * 1_000_003 + first + query for query in range(p.shape[1])]
    found = torch.empty(asked.signs, *p.shape, dtype=logits.dtype, device=p.device)
    root = p.sqrt()
    for one, epsilon in zip(found, balanced_signs(p, asked.signs, seeds), strict=True):
        along = root * epsilon
        one.copy_(along.addcmul_(p, along.sum(-1, keepdim=True), value=-1))
    return found


def balanced_signs(
    p: Float[Tensor, "batch queries vocabulary"], signs: int, seeds: Sequence[int]
) -> Iterator[Float[Tensor, "batch queries vocabulary"]]:
    """Random signs, one seed for each query, such that draws do not confuse the likeliest tokens with each other.

    ε_{s,y} = r_y H_{s, rank(y) mod T}: r random signs, H a Hadamard matrix of T ≥ `signs` columns, rank by p. E[ε εᵀ] is the identity, as of
    independent signs; and where `signs` is a power of two the mean over the draws of ε_y ε_y' is 0 for any two of T tokens that follow each
    other in rank, not only in expectation.
    """
    size = 1 << (signs - 1).bit_length()
    rows = torch.from_numpy(hadamard(size, dtype="float32"))[:signs].to(p.device, p.dtype)
    order = p.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(p.shape[-1], device=p.device) % size
    columns = torch.empty_like(order).scatter_(-1, order, places.expand_as(order))
    drawn = [torch.randint(0, 2, p.shape[-1:], generator=torch.Generator().manual_seed(one), dtype=torch.int8) for one in seeds]
    random = (2 * torch.stack(drawn) - 1).to(p.device, p.dtype)
    for row in rows:
        yield row[columns] * random
