"""How far apart two next-token distributions are."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def kl_divergence(
    full: Float[Tensor, "*batch vocabulary"], evicted: Float[Tensor, "*batch vocabulary"]
) -> Float[Tensor, " *batch"]:
    """KL(p‖p') = Σ_y p_y (log p_y − log p'_y) of softmax(full) against softmax(evicted), in nats, computed in float64."""
    log_full, log_evicted = full.double().log_softmax(-1), evicted.double().log_softmax(-1)
    terms = torch.where(log_full == -torch.inf, 0, log_full.exp() * (log_full - log_evicted))
    return terms.sum(-1)


def agreement(full: Float[Tensor, "*batch vocabulary"], evicted: Float[Tensor, "*batch vocabulary"]) -> Bool[Tensor, " *batch"]:
    """Whether the likeliest next token is the same."""
    return full.argmax(-1) == evicted.argmax(-1)
