"""SnapKV: an entry matters as much as the last queries of the prompt looked at it."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

Pooling = Literal["max", "mean", "none"]


@dataclass(frozen=True)
class SnapKV:
    """Mean attention of the last `window` queries, pooled along the keys, averaged over the heads that share a KV head.

    s_{k,i} = mean_{h in k} pool_i(mean_t A_{h,t,i}) for the entries before the window. The window itself is always kept,
    so it gets no score. Source: SnapKV (arXiv 2404.14469), as arXiv 2502.03805 uses it (Algorithm 2).

    Attributes:
        window: how many of the last queries look, and how many entries are always kept.
        kernel: width of the pooling, an odd number of entries; 1 pools nothing.
        pooling: "max" as the papers write it, "mean" as much public code has it, or "none".
    """

    window: int = 32
    kernel: int = 7
    pooling: Pooling = "max"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be an odd number of at least 1, not {self.kernel}")
        if self.pooling not in ("max", "mean", "none"):
            raise ValueError(f"pooling must be 'max', 'mean' or 'none', not {self.pooling!r}")

    def __call__(
        self, weights: Float[Tensor, "batch heads queries keys"], n_kv_heads: int
    ) -> Float[Tensor, "batch kv_heads candidates"]:
        """Scores of the keys − window entries that come before the window, in the dtype of the weights.

        Raises:
            ValueError: fewer queries than the window, or no entry before it.
        """
        queries, keys = weights.shape[-2:]
        if queries < self.window or keys <= self.window:
            raise ValueError(
                f"a window of {self.window} needs as many queries and more keys; got {queries} queries, {keys} keys"
            )
        looked_at = weights[..., -self.window :, : keys - self.window].mean(-2)
        pooled = self._pool(looked_at)
        return pooled.unflatten(1, (n_kv_heads, -1)).mean(2)

    def _pool(self, scores: Float[Tensor, "batch heads keys"]) -> Float[Tensor, "batch heads keys"]:
        if self.pooling == "none" or self.kernel == 1:
            return scores
        half = self.kernel // 2
        if self.pooling == "max":
            return functional.max_pool1d(scores, self.kernel, stride=1, padding=half)
        # at the ends the mean is over the neighbours there are, so that padding never lowers a score
        return functional.avg_pool1d(scores, self.kernel, stride=1, padding=half, count_include_pad=False)
