"""What happens before, in and after each pass of a model that is evicted from."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from eviction.cache import EvictedCache, RaggedLayer
from eviction.cache.broken import Before, break_cache, length_of, take_back
from eviction.cache.compact import compact, slots_of
from eviction.cache.hybrid import entries_of
from eviction.cache.owner import owner
from eviction.cache.reading import attend, densified, read
from eviction.cache.recent import Recent, watched
from eviction.cache.states import LatentStates, RaggedStates
from eviction.looking import observation, passed, recorded
from eviction.moments import Moments
from eviction.places import left_padding
from eviction.policy import Policy, Scored, merged
from eviction.select import Decision
from hooks.dispatch import AttentionCall, AttentionResult, Proceed
from hooks.errors import UnsupportedAttention
from hooks.forward import cache_keyword, given
from hooks.records import LayerRecord
from hooks.window import last_queries


@dataclass(frozen=True)
class Eviction:
    """What was decided after one pass.

    `decisions` are those of the layers that hold entries, in order, over all tokens `seen`: what stays of them. `keep` has one mask for
    each decoder layer, as `hooks.hiding` takes them: that of the layer whose entries it reads, or None where it has no attention.
    """

    cache: Cache
    seen: int
    decisions: tuple[Decision, ...]
    keep: tuple[Bool[Tensor, "batch _ seen"] | None, ...]


Watch = Callable[[Eviction], None]


@dataclass
class _Pass:
    """One pass of the model over one cache."""

    cache: Cache
    tokens: int
    batch: int
    padding: Tensor | None
    budget: int | float | None
    """None where no choice follows."""
    looks: bool
    before: Before
    calls: Counter[int] = field(default_factory=Counter)
    order: list[tuple[int, int]] = field(default_factory=list)
    spans: dict[tuple[int, int], tuple[RaggedLayer, Tensor | None]] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict)
    readers: Counter[int] = field(default_factory=Counter)
    recent: dict[int, Recent | None] = field(default_factory=dict)
    scored: dict[int, list[Scored]] = field(default_factory=dict)
    reading: tuple[AttentionCall, RaggedLayer] | None = None

    @property
    def pads(self) -> Tensor | None:
        """Pads of each row."""
        return None if self.padding is None else (~self.padding).sum(-1)


@dataclass
class Evictor:
    """The state of one `evicting` block; caches hold theirs themselves."""

    model: nn.Module
    policy: Policy
    budget: int | float
    moments: Moments
    watch: Watch | None
    choose: bool | None = None
    """Whether a choice follows the next pass; None leaves that to the moments."""
    running: _Pass | None = None
    calls: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(attention module, its how manieth call of a pass) -> (cache layer, its how manieth reader)."""
    places: dict[int, int] = field(default_factory=dict)
    """Decoder layer -> cache layer."""
    latent: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.window = self.policy.window

    @property
    def limit(self) -> int | None:
        """Queries that caches carry along; None for all since the policy looked."""
        if self.window is not None:
            return self.window
        return None if self.policy.adds_up and self.moments.every else 0

    def looks(self) -> bool:
        """Whether the pass that runs is recorded."""
        return self.running is not None and self.running.looks

    def sees(self) -> bool:
        """Whether the pass that runs must not be a compiled one: it is recorded, or its queries are taken along, or heads differ."""
        run = self.running
        return run is not None and (run.looks or self.moments.every is not None or EvictedCache(run.cache.layers).ragged)

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a pass: which cache it writes to, and whether a choice follows."""
        self.abandon()
        called, keyword = given(model, args, kwargs), cache_keyword(model)
        cache: Any = next((called[name] for name in ("cache", "past_key_values") if called.get(name) is not None), None)
        if called.get("use_cache") is False:
            raise ValueError(
                "use_cache=False leaves nothing to evict; leave it out, or run the model outside of the evicting block"
            )
        if cache is None:
            cache = DynamicCache(config=model.config)  # type: ignore[arg-type]
            kwargs = {**kwargs, keyword: cache, "use_cache": True}
        EvictedCache.require_support(cache)
        tokens = next(called[name] for name in ("input_ids", "inputs_embeds") if called.get(name) is not None)
        batch, count = tokens.shape[:2]
        seen = cache.get_seq_length()
        padding = left_padding((batch, seen + count), called.get("attention_mask"), whole=False)
        budget = self._due(cache, count)
        self.running = _Pass(
            cache,
            count,
            batch,
            padding,
            budget,
            budget is not None or not self.calls,
            Before.of(cache),
        )
        return args, kwargs

    def _due(self, cache: Cache, count: int) -> int | float | None:
        """The budget of the choice that follows a pass of `count` tokens."""
        if self.choose is not None:
            return self.budget if self.choose else None
        if count > 1:
            return self.budget if self.moments.prefill else None
        if self.moments.every is None:
            return None
        target = self.budget if self.moments.target is None else self.moments.target
        held = [entries_of(layer) for layer in cache.layers if getattr(layer, "keys", None) is not None]
        since = max((length_of(layer) + count - getattr(layer, "looked", 0) for layer in held), default=count)
        if since < self.moments.every:
            return None
        more = isinstance(target, float) or any(EvictedCache([layer]).entries + count > target for layer in held)
        return target if more or self.policy.adds_up else None

    def attend(self, call: AttentionCall, proceed: Proceed) -> AttentionResult:
        """The outermost handler: before the pass is recorded, if it is."""
        run, key = self.running, call.key
        if run is None:
            return attend(call, proceed)
        here = (id(call.module), run.calls[id(call.module)])
        run.calls[id(call.module)] += 1
        ragged = key.layer if isinstance(key, RaggedStates | LatentStates) else None
        if run.looks:
            run.order.append(here)
            if ragged is not None:
                run.spans[here] = (ragged, self._spans(run, call, ragged))
        elif self.limit != 0:
            self._remember(run, call, here)
        if isinstance(key, RaggedStates) and run.looks:
            # recorded as dense keys and values under a mask; read as ever, so that looking changes nothing
            window = None if run.padding is not None else self.window
            run.reading = (call, key.layer)
            return proceed(densified(call, key.layer, window))
        return attend(call, proceed)

    def compute(self, call: AttentionCall, proceed: Proceed) -> AttentionResult:
        """The innermost handler: ragged layers are read as they are, whatever was recorded of them."""
        run = self.running
        if run is None or run.reading is None:
            return proceed(call)
        (original, layer), run.reading = run.reading, None
        return read(original, layer)

    def _spans(self, run: _Pass, call: AttentionCall, layer: Any) -> Tensor | None:
        """What the call's last queries see; computed once for all calls with the same mask."""
        entries = entries_of(layer)
        key = (id(call.mask), type(entries), getattr(entries, "window", None), call.key.shape[2], layer.get_seq_length())
        if key not in run.known:
            window = last_queries(run.padding, run.batch, run.tokens, self.window)
            run.known[key] = (
                call.mask,
                passed(layer, call, window, run.pads),
            )  # the mask is held, so that its id stays its own
        return run.known[key][1]

    def _remember(self, run: _Pass, call: AttentionCall, here: tuple[int, int]) -> None:
        """Take the call's last queries along, in a pass that is not recorded."""
        if here not in self.calls:
            raise UnsupportedAttention(f"{type(call.module).__name__} attends in this pass, but did not in those before")
        place, reader = self.calls[here]
        window = last_queries(run.padding, run.batch, run.tokens, self.window)
        layer = run.cache.layers[place]
        spans = self._spans(run, call, layer)
        sinks = call.options.get("s_aux", call.options.get("sinks"))
        each = {} if sinks is None or sinks.dim() == 1 else {reader: window.take(sinks.squeeze(-1), 2)}
        new = None if spans is None else Recent({reader: window.take(call.query, 2)}, spans, each)
        self._join(run, place, reader, new)

    def _join(self, run: _Pass, place: int, reader: int, new: Recent | None) -> None:
        """Note the pass's queries of one reader beside those of the others."""
        old = run.recent.get(place)
        if reader and old is not None and new is not None:
            new = replace(old, queries={**old.queries, **new.queries}, sinks={**old.sinks, **new.sinks})
        run.recent[place] = new if reader == 0 or old is not None else None

    def look(self, record: LayerRecord) -> None:
        """A layer of a recorded pass is done."""
        run = self.running
        assert run is not None
        here = run.order.pop(0)
        ragged, spans = run.spans.pop(here, (None, None))
        if ragged is None:
            place, latent = owner(run.cache, record)
        else:
            place, latent = next(i for i, layer in enumerate(run.cache.layers) if entries_of(layer) is ragged), ragged.latent
        layer = run.cache.layers[place]
        reader = run.readers[place]
        run.readers[place] += 1
        if latent:
            self.latent.add(place)
        if self.places.setdefault(record.layer, place) != place or (reader and place in self.latent):
            raise UnsupportedAttention(
                f"decoder layer {record.layer} attends several times in a pass, to entries of its own each time; looped layers cannot be "
                "evicted from"
            )
        self.calls[here] = (place, reader)
        self._join(run, place, reader, recorded(layer, record, reader, run.pads, spans))
        if run.budget is None:
            return
        seen = observation(layer, record, reader, self._recent(run, place), latent=latent, pads=run.pads)
        run.scored.setdefault(place, []).append(self.policy.score(seen, run.budget))

    def _recent(self, run: _Pass, place: int) -> Recent | None:
        """The last queries, this pass's and those before."""
        new = run.recent.get(place)
        if new is None:
            return None
        layer: Any = entries_of(run.cache.layers[place])
        old = getattr(layer, "recent", None)
        if self.limit == 0 or old is None or not new.queries.keys() <= old.queries.keys():
            return new
        # a cache that went on elsewhere has seen queries that are not known here
        follows = int(old.spans[:, -1, 1].amax()) == layer.get_seq_length() - run.tokens - 1
        return old.followed_by(new, self.limit) if follows else new

    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After a pass: choose, free, and take the last queries along."""
        run = self.running
        if run is None:
            return
        carry = {place: self._recent(run, place) if self.limit != 0 else None for place in run.recent}
        if run.budget is not None and run.scored:
            self._evict(run)
            if self.policy.adds_up:
                carry = {}
        self.running = None
        layers = run.cache.layers
        for place, layer in enumerate(layers):
            layers[place] = layer = watched(layer)
            if place in run.readers or place in carry:
                entries_of(layer).recent = carry.get(place)
            if run.budget is not None and hasattr(entries_of(layer), "looked"):
                entries_of(layer).looked = length_of(layer)

    def _evict(self, run: _Pass) -> None:
        cache, places = run.cache, sorted(run.scored)
        decided = self.policy.decide_all([merged(run.scored[place]) for place in places])
        over = [_over_all(cache.layers[place], decision) for place, decision in zip(places, decided, strict=True)]
        masks = {place: decision.keep for place, decision in zip(places, over, strict=True)}
        carried = self._carried(run, places)
        seen, layers = cache.get_seq_length(), len(cache.layers)
        try:
            kept = [masks.get(place) for place in range(layers)]
            cache.layers[:] = compact(
                cache.layers, kept, padding=run.padding, latent=self.latent, carried=carried, consume=True
            )
        except BaseException:
            break_cache(cache, "an eviction from it was interrupted half done")
            self.running = None
            raise
        if self.watch is not None:
            every = range(max(max(self.places) + 1, layers))
            keep = tuple(masks.get(self.places[layer]) if layer in self.places else None for layer in every)
            self.watch(Eviction(cache, seen, tuple(over), keep))

    def _carried(self, run: _Pass, places: list[int]) -> Mapping[int, Tensor] | None:
        """What each entry was given so far [batch, kv_heads, held, readers · group]."""
        if not self.policy.adds_up:
            return None
        carried = {}
        for place in places:
            layer: Any = run.cache.layers[place]
            heads = layer.keys.shape[1]
            parts = [each.carried.unflatten(1, (heads, -1)) for each in run.scored[place] if each.carried is not None]
            # a sliding window's cache holds the last of those that attention saw
            carried[place] = torch.cat(parts, 2).movedim(2, 3)[:, :, -_held(layer) :]
        return carried

    def abandon(self) -> None:
        """A pass that did not come to its end is taken back."""
        run, self.running = self.running, None
        if run is not None:
            take_back(run.cache, run.before)


def _held(layer: Any) -> int:
    return slots_of(layer).shape[2]


def _over_all(layer: Any, decision: Decision) -> Decision:
    """The decision over the entries of a layer, over all tokens seen."""
    slots, seen = slots_of(layer).long(), layer.get_seq_length()

    def spread(mask: Tensor) -> Tensor:
        mask = mask[..., -slots.shape[2] :]
        at = slots.where(slots >= 0, seen).expand_as(mask)
        return mask.new_zeros(*mask.shape[:2], seen + 1).scatter_(2, at, mask)[..., :seen]

    return Decision(spread(decision.keep), None if decision.stage1 is None else spread(decision.stage1))
