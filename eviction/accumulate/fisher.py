"""Fisher and straight-through: an entry matters as much as the next-token distribution would change without it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eviction.accumulate.near import reaching
from eviction.checks import share, whole
from eviction.observation import Observation
from eviction.signs import Asked, Path


@dataclass(frozen=True)
class Fisher:
    """½ E_ε[(Σ_{h in k} A_{h,i} / (1 − A_{h,i}) · g_h·(o_h − v_i))²], the KL of removing entry i of KV head k to second order, in nats.

    A/(1 − A)·(o − v) is what the removal does to a head's output, g the gradient of Σ_y √p_y ε_y log p_y with respect to it, for `signs` draws
    of random signs ε over the vocabulary (`eviction.replay`); the mean over the window's queries. In every layer and head the unit is
    the same, so one ranking over the model is an allocation. Ours; arXiv 2610.06479 asks for the same KL.

    Attributes:
        window: how many of the last queries look, and how many entries are always kept.
        signs: draws of signs.
        dilation: an entry scores at least this times any score that reaches it; 0 dilates nothing. What comes next often goes on where the
            window's queries looked, so that a score reaches further on than back.
        before: places that a score reaches back.
        after: places that a score reaches on.
        seed: of the signs.
        sink: entries at the start that are always kept.
    """

    window: int = 32
    signs: int = 8
    dilation: float = 0.01
    before: int = 7
    after: int = 31
    seed: int = 0
    sink: int = 4

    path: ClassVar[Path] = "model"
    source: ClassVar[str] = "ours; the KL that arXiv 2610.06479 asks for"

    def __post_init__(self) -> None:
        whole("window", self.window, 1)
        whole("signs", self.signs, 1)
        share("dilation", self.dilation)
        whole("before", self.before, 0)
        whole("after", self.after, 0)
        whole("seed", self.seed, 0)
        whole("sink", self.sink, 0)

    @property
    def queries(self) -> int:
        """The window's."""
        return self.window

    @property
    def behaviour(self) -> Asked:
        """How the KL is estimated."""
        return Asked(self.signs, self.seed, self.path)

    @property
    def ends(self) -> tuple[int, int]:
        """The sink and the window are kept."""
        return self.sink, self.window

    def __call__(self, seen: Observation, protected: Bool[Tensor, "batch _ keys"]) -> Float[Tensor, "batch heads keys"]:
        """Nats; the same for all heads of a cached KV head.

        Raises:
            ValueError: the observation has no such estimate: it is made where a model runs (`prefill`, `evicting`), not from a record alone.
        """
        if seen.nats is None:
            raise ValueError(
                "this policy needs the model to run again: use it with prefill, generate, evicting or look, not on a record alone"
            )
        nats = seen.nats
        scored = (nats * (seen.valid & ~protected)).repeat_interleave(seen.record.n_heads // seen.n_kv_heads, 1)
        if not self.dilation:
            return scored
        return torch.maximum(scored, self.dilation * reaching(scored, seen, self.before, self.after))


@dataclass(frozen=True)
class StraightThrough(Fisher):
    """The same KL of removing entry i, with what lies between its layer and the final norm taken as the identity.

    A/(1 − A)·(o − v) W_h reaches the final norm as it is; its Jacobian and the LM head carry it to the logits, and the KL is
    ½ δzᵀ (diag p − ppᵀ) δz, by the signs of `Fisher`, whose settings these are. Source: arXiv 2610.06479, as far as it is public.
    """

    path: ClassVar[Path] = "residual"
    source: ClassVar[str] = "arXiv 2610.06479, as far as it is public"
