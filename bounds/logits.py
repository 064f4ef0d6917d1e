"""Upper bounds on KL(p ‖ p') from what a removal does to the logits. Nothing here knows how the KL itself is computed.

With δz = z' − z, p = softmax(z) and p' = softmax(z'): KL(p ‖ p') = log E_p[e^{X}], X = δz − E_p δz, so that what bounds the log of the
moment generating function of a centred variable bounds the KL. Computed in float64, in nats.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from bounds.inputs import finite

SERIES = 0.1
"""Below this e^x − 1 − x is taken from its series."""


def hoeffding(
    full: Float[Tensor, "*#batch vocabulary"], evicted: Float[Tensor, "*#batch vocabulary"]
) -> Float[Tensor, " *batch"]:
    """(max δz − min δz)² / 8 ≥ KL(softmax(full) ‖ softmax(evicted)), by Hoeffding's lemma.

    A constant added to all logits changes nothing. Tokens that are impossible (−inf) in both are left out.

    Raises:
        ValueError: a logit is NaN or +inf, or −inf in one of the two alone: no finite bound holds then.
    """
    change, _ = _change(full, evicted)
    return finite((_highest(change) - _lowest(change)).square() / 8, "the bound")


def bennett(
    full: Float[Tensor, "*#batch vocabulary"], evicted: Float[Tensor, "*#batch vocabulary"]
) -> Float[Tensor, " *batch"]:
    """log((b² e^{−v/b} + v e^b) / (b² + v)) ≥ KL(softmax(full) ‖ softmax(evicted)), with b = max X and v = E_p X²; at most Hoeffding's.

    Of all centred variables at most b with variance v, the one on {−v/b, b} has the largest moment generating function (Bennett 1962); where
    δz takes two values it is that variable, and the bound is the KL. For small changes it is v/2, as the KL is.

    Raises:
        ValueError: as `hoeffding`.
    """
    change, log_p = _change(full, evicted)
    impossible = change.isnan()
    mean = torch.where(impossible, 0, log_p.exp() * change).sum(-1, keepdim=True)
    centred = change - mean
    high = _highest(centred).clamp(min=0)
    # in logs: a token too unlikely for float64 may get all the weight
    log_variance = torch.where(impossible, -torch.inf, log_p + 2 * centred.abs().log()).logsumexp(-1)
    safe = high.where(high > 0, 1)  # where nothing lies above the mean, all that has weight lies on it
    low = -(log_variance - safe.log()).exp()
    both = torch.logaddexp(log_variance, 2 * safe.log())
    log_share, log_remain = log_variance - both, 2 * safe.log() - both
    small = torch.log1p(log_remain.exp() * _rest(low) + log_share.exp() * _rest(safe))  # the terms of first order cancel
    large = torch.logaddexp(log_remain + low, log_share + safe)
    found = torch.where(safe > 1, large, small)
    return finite(torch.where((high > 0) & (log_variance > -torch.inf), found, 0).clamp(min=0), "the bound")


def _change(full: Tensor, evicted: Tensor) -> tuple[Tensor, Tensor]:
    """δz, NaN where a token is impossible, and log p."""
    full, evicted = torch.broadcast_tensors(full.double(), evicted.double())
    for name, logits in (("full", full), ("evicted", evicted)):
        if bool((logits.isnan() | (logits == torch.inf)).any()):
            raise ValueError(f"{name} logits {tuple(logits.shape)} hold NaN or +inf")
    impossible = full == -torch.inf
    if not torch.equal(impossible, evicted == -torch.inf):
        raise ValueError(
            f"{int((impossible != (evicted == -torch.inf)).sum())} logits are -inf in one of full and evicted alone; the KL, or every bound on "
            "it from logits, is infinite then"
        )
    if bool(impossible.all(-1).any()):
        raise ValueError(f"of logits {tuple(full.shape)} a row is -inf everywhere")
    return torch.where(impossible, torch.nan, evicted - full), full.log_softmax(-1)


def _highest(change: Tensor) -> Tensor:
    return change.nan_to_num(nan=-torch.inf).amax(-1)


def _lowest(change: Tensor) -> Tensor:
    return change.nan_to_num(nan=torch.inf).amin(-1)


def _rest(x: Tensor) -> Tensor:
    """e^x − 1 − x without losing its digits near 0."""
    small = x.clamp(-SERIES, SERIES)
    term, total = small.square() / 2, small.square() / 2
    for order in range(3, 12):
        term = term * small / order
        total = total + term
    return torch.where(x.abs() <= SERIES, total, torch.expm1(x) - x)
