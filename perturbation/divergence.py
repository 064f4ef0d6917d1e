"""How far apart two next-token distributions are."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
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


def total_variation(
    full: Float[Tensor, "*batch vocabulary"], evicted: Float[Tensor, "*batch vocabulary"]
) -> Float[Tensor, " *batch"]:
    """½ Σ_y |p_y − p'_y|, in [0, 1], computed in float64."""
    return (full.double().softmax(-1) - evicted.double().softmax(-1)).abs().sum(-1) / 2


@dataclass(frozen=True)
class Behaviour:
    """What an eviction does to next-token distributions, for each candidate and query.

    Attributes:
        kl: KL(full ‖ evicted), in nats.
        reverse_kl: KL(evicted ‖ full), in nats.
        total_variation: half of the L1 distance.
        agreement: whether the likeliest token is the same.
        log_likelihood: change of the log-probability of the token that follows, in nats, negative where it got less likely; of all
            queries but the last, whose next token is not known.
    """

    kl: Float[Tensor, "candidates queries"]
    reverse_kl: Float[Tensor, "candidates queries"]
    total_variation: Float[Tensor, "candidates queries"]
    agreement: Bool[Tensor, "candidates queries"]
    log_likelihood: Float[Tensor, "candidates later"]


def behaviour(
    full: Float[Tensor, "candidates queries vocabulary"],
    evicted: Float[Tensor, "candidates queries vocabulary"],
    tokens: Int[Tensor, " later"],
) -> Behaviour:
    """All of it from logits; `tokens` are those that follow the queries but the last."""
    change = (evicted.double().log_softmax(-1) - full.double().log_softmax(-1))[:, : len(tokens)]
    return Behaviour(
        kl_divergence(full, evicted),
        kl_divergence(evicted, full),
        total_variation(full, evicted),
        agreement(full, evicted),
        change.gather(2, tokens[None, :, None].expand(change.shape[0], -1, 1))[..., 0],
    )
