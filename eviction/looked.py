"""A prompt that a model ran once, at which any number of policies may look: what each would keep, without a cache for each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from eviction.behaviour import held_by_call, run_again
from eviction.cache import EvictedCache
from eviction.cache.owner import owner
from eviction.looking import last_query, observation
from eviction.observation import Observation
from eviction.passes import over_all
from eviction.places import left_padding, require_places, require_prompt, require_rerun
from eviction.policy import Policy, Scored, merged
from eviction.replay import Call, removal_nats
from eviction.select import Decision
from eviction.signs import Asked
from hooks.capture import capture
from hooks.forward import forward
from hooks.records import LayerRecord

Decisions = tuple[Decision | None, ...]
"""For each decoder layer; None for one without attention."""


def kept_of(decisions: Decisions) -> tuple[Bool[Tensor, "batch _ tokens"] | None, ...]:
    """The keep-mask of each decoder layer, as `hooks.hiding` takes them."""
    return tuple(None if one is None else one.keep for one in decisions)


@dataclass
class Looked:
    """What attention used for a prompt, layer by layer, and the KL of removals, for policies that ask for it; made by `look`.

    Nothing was evicted. A policy decides here what it does after a prefill in one piece (`prefill`), to the entry. Keys and values of all
    layers are held.

    Attributes:
        observations: for each attention call, in order, what a policy may see of it.
        places: of each call, the cache layer whose entries it reads.
        logits: of the last token [batch, vocabulary].
    """

    model: nn.Module
    tokens: Int[Tensor, "batch tokens"]
    cache: DynamicCache
    calls: list[Call]
    observations: list[Observation]
    places: list[int]
    logits: Float[Tensor, "batch vocabulary"]
    padding: Bool[Tensor, "batch tokens"] | None = None
    latent: frozenset[int] = frozenset()
    """Cache layers whose entries the model expands before attention."""
    _narrow: dict[int, list[Observation]] = field(default_factory=dict)
    _nats: dict[tuple[Asked, int], dict[Call, Tensor]] = field(default_factory=dict)

    def decide(self, policy: Policy, budget: int | float) -> tuple[Bool[Tensor, "batch _ tokens"] | None, ...]:
        """What `policy` keeps: for each decoder layer a mask, as `hooks.hiding` takes them; None for one without attention.

        Raises:
            BudgetError: the budget is outside its range.
            ValueError: the policy looks at more queries than were captured.
            UnsupportedAttention: it asks for that, and layers have linear states.
        """
        return kept_of(self.decisions(policy, budget))

    @torch.no_grad()
    def decisions(self, policy: Policy, budget: int | float) -> Decisions:
        """The same with what the first of two stages was certain of: for each decoder layer the decision over all tokens seen.

        Raises:
            BudgetError, ValueError, UnsupportedAttention: as `decide`.
        """
        scored: dict[int, list[Scored]] = {}
        for place, seen in zip(self.places, self.seen_by(policy, budget), strict=True):
            scored.setdefault(place, []).append(policy.score(seen, budget))
        places = sorted(scored)
        chosen = policy.decide_all([merged(scored[place]) for place in places])
        decided = {place: over_all(self.cache.layers[place], one) for place, one in zip(places, chosen, strict=True)}
        by_layer = self._by_layer
        return tuple(
            decided[by_layer[layer]] if layer in by_layer else None
            for layer in range(max(max(by_layer) + 1, len(self.cache.layers)))
        )

    @property
    def _by_layer(self) -> dict[int, int]:
        """The cache layer that each decoder layer reads."""
        return {seen.record.layer: place for place, seen in zip(self.places, self.observations, strict=True)}

    def evicted(self, keep: Sequence[Bool[Tensor, "batch _ tokens"] | None] | None = None) -> EvictedCache:
        """A cache of the entries that `keep` (as `decide` gives it) keeps; None keeps all. The full cache stays as it is.

        Examples:
            >>> from eviction import policy
            >>> seen = look(model, tokens)
            >>> seen.evicted(seen.decide(policy("adakv", window=8), 0.5)).entries  # of 48, a head
            24

        Raises:
            ValueError: there is no mask for a layer with attention, or one does not fit.
        """
        masks: list[Tensor | None] = [None] * len(self.cache.layers)
        batch, length = self.tokens.shape
        for layer, place in self._by_layer.items():
            held: Any = self.cache.layers[place]
            if keep is None:
                mask = held.keys.new_ones(batch, held.keys.shape[1], length, dtype=torch.bool)
            elif layer < len(keep) and (found := keep[layer]) is not None:
                mask = found
            else:
                raise ValueError(f"layer {layer} calls attention, but there is no keep-mask for it ({len(keep)} are given)")
            masks[place] = mask
        return EvictedCache.compacted(self.cache, masks, padding=self.padding, latent=self.latent)

    def seen_by(self, policy: Policy, budget: int | float = 1.0) -> list[Observation]:
        """What `policy` sees of each attention call: the queries of its own window, and the KL of removals if it asks for that.

        The budget counts for selections that ask what removals do together.

        Raises:
            ValueError: it looks at more queries than were captured.
            UnsupportedAttention: it asks for that, and layers have linear states.
        """
        length, captured = self.tokens.shape[1], self.observations[0].record.n_queries
        window = length if policy.window is None else min(policy.window, length)
        if window > captured:
            raise ValueError(
                f"{policy.name} looks at {window} queries, and {captured} were captured; look again with window={policy.window}"
            )
        seen = self._last(window)
        if policy.behaviour is None:
            return seen
        found = run_again(
            self.model,
            policy,
            budget,
            self.tokens[:, -window:],
            dict(zip(self.calls, seen, strict=True)),
            length=self.tokens.shape[1],
            padding=self.padding,
            known=self.nats(policy.behaviour, window),
        )
        return list(found.values())

    def forget(self) -> None:
        """Let go of the KLs of removals; they are computed again when a policy asks."""
        self._nats.clear()

    def _last(self, window: int) -> list[Observation]:
        if window not in self._narrow:
            self._narrow[window] = [replace(one, record=last_query(one.record, window)) for one in self.observations]
        return self._narrow[window]

    @torch.no_grad()
    def nats(self, asked: Asked, window: int) -> dict[Call, Float[Tensor, "batch heads keys"]]:
        """`removal_nats` of the last `window` tokens, computed once."""
        if (asked, window) not in self._nats:
            require_rerun(self.cache)
            seen = self._last(window)
            self._nats[asked, window] = removal_nats(
                self.model,
                self.tokens[:, -window:],
                held_by_call(dict(zip(self.calls, seen, strict=True))),
                asked,
                seen=self.tokens.shape[1],
                attention_mask=None if self.padding is None else self.padding.long(),
            )
        return self._nats[asked, window]


@torch.no_grad()
def look(
    model: nn.Module,
    prompt: Int[Tensor, "batch prompt"],
    *,
    window: int | None = 32,
    attention_mask: Shaped[Tensor, "batch prompt"] | None = None,
) -> Looked:
    """Run the prompt once on the full cache, for policies that look at its last `window` queries or fewer (None: at all of them).

    Examples:
        >>> from eviction import policy
        >>> seen = look(model, tokens, window=8)
        >>> masks = {name: seen.decide(policy(name, window=8), 0.5) for name in ("snapkv", "fisher")}
        >>> masks["fisher"][0].shape  # of each layer: row, KV head, token
        torch.Size([1, 2, 48])

    Args:
        model: as for `prefill`.
        prompt: tokens; in a batch of different lengths padded on the left.
        window: queries that are captured.
        attention_mask: 0 where a token is a pad.

    Raises:
        ValueError: there is no token, or the mask does not fit or pads on the right.
        UnsupportedAttention: the model's attention or cache cannot be evicted from.
    """
    require_prompt(prompt)
    require_places(model)
    padding = left_padding((prompt.shape[0], prompt.shape[1]), attention_mask)
    pads = None if padding is None else (~padding).sum(-1)
    cache = DynamicCache(config=model.config)  # type: ignore[arg-type]
    EvictedCache.require_support(cache)
    known = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    calls: list[Call] = []
    observations: list[Observation] = []
    places: list[int] = []
    latents: set[int] = set()
    readers: Counter[int] = Counter()

    def visit(record: LayerRecord) -> None:
        place, latent = owner(cache, record)
        calls.append((known[record.name], sum(module == known[record.name] for module, _ in calls)))
        observations.append(observation(cache.layers[place], record, readers[place], None, latent=latent, pads=pads))
        places.append(place)
        readers[place] += 1
        if latent:
            latents.add(place)

    with capture(model, window=window, visitor=visit):
        logits = forward(model, prompt, cache, last_logits=1, attention_mask=attention_mask)
    return Looked(model, prompt, cache, calls, observations, places, logits[:, -1], padding, frozenset(latents))
