"""What observations need of the model beside what was captured: the KL of removals, and their sketches where a selection asks for them."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor, nn

from eviction.live import Held, Sketch
from eviction.observation import Observation
from eviction.policy import Policy
from eviction.replay import Call, removal_nats
from eviction.select.top import best


@torch.no_grad()
def run_again(
    model: nn.Module,
    policy: Policy,
    budget: int | float,
    tokens: Int[Tensor, "batch window"],
    seen: Mapping[Call, Observation],
    *,
    length: int,
    padding: Tensor | None,
    known: Mapping[Call, Tensor] | None = None,
) -> dict[Call, Observation]:
    """The observations with what `policy.behaviour` asks for.

    Args:
        model: that they are of.
        policy: one that asks for it.
        budget: what it is for.
        tokens: the window's, the last of `length`.
        seen: by attention call.
        length: tokens so far.
        padding: True where there is a token.
        known: nats that were computed before.
    """
    asked = policy.behaviour
    assert asked is not None
    mask = None if padding is None else padding.long()
    held = held_by_call(seen)
    nats = removal_nats(model, tokens, held, asked, seen=length, attention_mask=mask) if known is None else known
    found = {call: replace(one, nats=nats[call]) for call, one in seen.items()}
    if policy.pool is None:
        return found
    sketches = {call: _sketch(policy, budget, one, policy.pool) for call, one in found.items()}
    removal_nats(model, tokens, held, asked, seen=length, attention_mask=mask, sketches=sketches)
    return {call: replace(one, sketch=sketches[call]) for call, one in found.items()}


def held_by_call(seen: Mapping[Call, Observation]) -> dict[Call, Held]:
    """What each attention call reads when the window's tokens run again."""
    return {call: Held(one.record, one.places, one.n_kv_heads) for call, one in seen.items()}


def _sketch(policy: Policy, budget: int | float, seen: Observation, share: float) -> Sketch:
    """One for a pool of `share` times each row's uniform budget: what is kept anyway, then the highest."""
    assert seen.nats is not None
    base, protected, free = policy.parts(seen, budget)
    valid = (protected | free).expand_as(seen.nats)
    counts = torch.minimum(valid.sum(-1), (share * base[:, None] + 0.5).long())
    taken = best(seen.nats, counts, protected, free)
    pool = taken.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., : int(counts.amax())]
    return Sketch(pool, taken.gather(-1, pool), valid)
