"""Head scores, which HeadKV's budgets follow: what each query head does while a model repeats a needle from a long context."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Measure = Literal["headkv", "copy"]


@dataclass(frozen=True)
class HeadScores:
    """One row for each layer that holds entries, one number in [0, 1] for each of its query heads; with how they came about.

    Attributes:
        scores: as `HeadKV(scores=…)` takes them.
        model: whose heads they are.
        measure: "headkv" (`needle_mass`) or "copy" (`copied`).
        contexts: needle contexts that they are the mean over.
        context_length: tokens of each.
        seed: chose the contexts.
        answered: the share of the needle's tokens that the model itself would have said; where it does not find the needle, its heads say
            little.
    """

    scores: tuple[tuple[float, ...], ...]
    model: str
    measure: Measure
    contexts: int
    context_length: int
    seed: int
    answered: float

    def save(self, path: str | Path) -> None:
        """Write JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "HeadScores":
        """Read what `save` (or `criticalkv head-scores`) wrote.

        Raises:
            ValueError: the file is not JSON of that form, or a score is not a number of at least 0.
        """
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = tuple(tuple(float(score) for score in row) for row in given.pop("scores"))
            made = cls(scores=rows, **given)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no head scores: {error}; `criticalkv head-scores` makes them") from error
        if not all(math.isfinite(score) and score >= 0 for row in rows for score in row):
            raise ValueError(f"{path} holds head scores that are not finite or below 0")
        return made


def needle_mass(weights: Float[Tensor, "heads queries keys"], needle: slice) -> Float[Tensor, " heads"]:
    """(1/T) Σ_t Σ_i A_{h,t,i} over the entries i of the needle that are among the N that query t looks at most, N the needle's length.

    Source: the retrieval-reasoning score of HeadKV (arXiv 2410.19258), as a mean over the T answer tokens. Of equal weights the earlier
    counts as the larger.
    """
    length = needle.stop - needle.start
    order = weights.argsort(dim=-1, descending=True, stable=True)[..., :length]
    inside = (order >= needle.start) & (order < needle.stop)
    return (weights.gather(-1, order) * inside).sum(-1).mean(-1)


def copied(
    weights: Float[Tensor, "heads queries keys"], needle: slice, tokens: Int[Tensor, " keys"], answer: Int[Tensor, " queries"]
) -> Float[Tensor, " heads"]:
    """The share of answer tokens for which the entry that the query looks at most lies in the needle and is that token.

    Source: the retrieval score of arXiv 2404.15574, over the positions of the answer instead of its set of tokens.
    """
    most = weights.argmax(-1)  # [heads, queries]
    inside = (most >= needle.start) & (most < needle.stop)
    return (inside & (tokens[most] == answer)).to(torch.promote_types(torch.float32, weights.dtype)).mean(-1)
