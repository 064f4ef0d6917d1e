"""Before it measures anything, a run checks itself: is what was captured what the model used, and does evicting nothing
change nothing?"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from analysis.experiments.reproduction import attention_error, projection_error, relative_error
from hooks.records import LayerRecord


class SelfCheckFailed(RuntimeError):
    """Capture or eviction does not reproduce this model; no number of the run could be trusted."""


@dataclass(frozen=True)
class SelfCheck:
    """Relative errors ‖ours − model's‖₂ / ‖model's‖₂, the largest over the layers, and what rounding allows.

    `attention`: Σ_i A_i v_i from captured Q, K, V against the attention output. `projection`: Σ_h (Σ_i A_i v_i) W_h + bias
    against what W_O returned. `evict_nothing`: logits on an evicted cache that keeps everything against the full cache.
    """

    attention: float
    projection: float
    evict_nothing: float
    tolerance: float

    def require(self) -> None:
        """Raises:
        SelfCheckFailed: an error exceeds the tolerance; the message names it.
        """
        for name in ("attention", "projection", "evict_nothing"):
            error = getattr(self, name)
            if not error <= self.tolerance:
                raise SelfCheckFailed(
                    f"self-check '{name}' failed: relative error {error:.2e}, allowed {self.tolerance:.2e}. The numbers of "
                    "this run would be wrong; please report the model and the versions"
                )


def check(captures: Iterable[Iterable[LayerRecord]], full_logits: Tensor, kept_all_logits: Tensor, *, eager: bool) -> SelfCheck:
    """Compare what was captured in each pass with what the model computed in it, layer by layer.

    16 ε of the model's dtype is allowed: a few roundings of each entry, which do not add up in a norm over all of them. Many families'
    eager attention casts its softmax to float32 whatever the dtype: under `eager` ε is float32's at least.
    """
    records = [record for captured in captures for record in captured]
    attention = max(attention_error(record) for record in records)
    projection = max(projection_error(record) for record in records)
    eps = torch.finfo(full_logits.dtype).eps
    tolerance = 16 * (max(eps, torch.finfo(torch.float32).eps) if eager else eps)
    return SelfCheck(attention, projection, relative_error(kept_all_logits, full_logits), tolerance)
