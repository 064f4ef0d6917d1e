"""What happens before, in and after each pass of a model that is evicted from."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from eviction.behaviour import run_again
from eviction.cache import EvictedCache
from eviction.cache.broken import Before, break_cache, length_of, take_back
from eviction.cache.compact import compact
from eviction.cache.hybrid import entries_of
from eviction.cache.owner import owner
from eviction.cache.reading import attend, densified, read
from eviction.cache.recent import Recent, watched
from eviction.cache.states import LatentStates, RaggedStates
from eviction.looking import last_query, observation, passed, recorded
from eviction.moments import Moments
from eviction.passes import Eviction, Pass, Watch, changed, held_by, over_all
from eviction.places import left_padding, require_pads_left_out, require_rerun
from eviction.policy import Policy, merged
from hooks.capture import window_sinks
from hooks.dispatch import AttentionCall, AttentionResult, Proceed
from hooks.errors import UnsupportedAttention
from hooks.forward import cache_given, cache_keyword, given, last_places, tokens_given
from hooks.records import LayerRecord
from hooks.window import last_queries


class _Raised(Exception):
    """A pass did not come to its end."""


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
    running: Pass | None = None
    calls: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(attention module, which of its calls in a pass) -> (cache layer, which of its readers)."""
    places: dict[int, int] = field(default_factory=dict)
    """Decoder layer -> cache layer."""
    latent: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.window = self.policy.window
        self.asked = self.policy.behaviour
        self.replays = False

    @property
    def limit(self) -> int | None:
        """Queries that caches carry along; None for all since the policy looked."""
        if self.window is not None:
            return self.window
        return None if self.policy.adds_up and self.moments.every else 0

    def looks(self) -> bool:
        """Whether the pass that runs is recorded."""
        return self.running is not None and self.running.looks and not self.replays

    def sees(self) -> bool:
        """Whether the pass that runs must not be a compiled one: it is recorded, or its queries are taken along, or heads differ."""
        run = self.running
        return run is not None and (run.looks or self.moments.every is not None or EvictedCache(run.cache.layers).ragged)

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a pass: which cache it writes to, and whether a choice follows."""
        if self.replays:
            return args, kwargs
        run = self.running
        if run is not None and run.thread is not threading.current_thread() and run.thread.is_alive():
            raise RuntimeError(
                f"a pass of thread {run.thread.name} is running in this evicting block; a block is for one thread at a time"
            )
        self.abandon()
        called, keyword = given(model, args, kwargs), cache_keyword(model)
        cache, tokens = cache_given(called), tokens_given(called)
        if called.get("use_cache") is False:
            raise ValueError(
                "use_cache=False leaves nothing to evict; leave it out, or run the model outside of the evicting block"
            )
        if cache is None:
            cache = DynamicCache(config=model.config)  # type: ignore[arg-type]
            args, kwargs = changed(model, args, kwargs, {keyword: cache, "use_cache": True})
        EvictedCache.require_support(cache)
        if tokens is None:
            raise ValueError("a pass without input_ids or inputs_embeds has no tokens to write to a cache")
        batch, count = tokens.shape[:2]
        asked = called.get("logits_to_keep")
        if isinstance(asked, int) and asked > 0:
            args, kwargs = changed(model, args, kwargs, {"logits_to_keep": last_places(tokens, asked)})
        seen = cache.get_seq_length()
        padding = left_padding((batch, seen + count), called.get("attention_mask"), whole=False)
        require_pads_left_out(cache, padding, seen)
        budget = self._due(cache, count)
        ids = called.get("input_ids")
        if self.asked and ids is None:
            raise ValueError("this policy runs the last tokens again; give the model input_ids, not inputs_embeds")
        self.running = Pass(
            cache,
            count,
            batch,
            padding,
            budget,
            budget is not None or not self.calls,
            Before.of(cache),
            ids if self.asked else None,
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
        if self.replays:
            return proceed(call)
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

    def _spans(self, run: Pass, call: AttentionCall, layer: Any) -> Tensor | None:
        """What the call's last queries see; computed once for all calls with the same mask."""
        entries = entries_of(layer)
        windows = (getattr(entries, "window", None), call.options.get("sliding_window"))
        key = (id(call.mask), type(entries), *windows, call.key.shape[2], layer.get_seq_length())
        if key not in run.known:
            window = last_queries(run.padding, run.batch, run.tokens, self.window)
            # the mask is held, so that its id stays its own
            run.known[key] = (call.mask, passed(layer, call, window, run.pads))
        return run.known[key][1]

    def _remember(self, run: Pass, call: AttentionCall, here: tuple[int, int]) -> None:
        """Take the call's last queries along, in a pass that is not recorded."""
        if here not in self.calls:
            raise UnsupportedAttention(f"{type(call.module).__name__} attends in this pass, but did not in those before")
        place, reader = self.calls[here]
        window = last_queries(run.padding, run.batch, run.tokens, self.window)
        layer = run.cache.layers[place]
        spans = self._spans(run, call, layer)
        sinks = window_sinks(call, window)
        each = {} if sinks is None or sinks.dim() == 1 else {reader: sinks}
        new = None if spans is None else Recent({reader: window.take(call.query, 2)}, spans, each)
        self._join(run, place, reader, new)

    def _join(self, run: Pass, place: int, reader: int, new: Recent | None) -> None:
        """Note the pass's queries of one reader beside those of the others."""
        old = run.recent.get(place)
        if new is not None and run.ids is not None:
            new = replace(new, tokens=run.ids[:, -new.count :])
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
        # what adds up does so now, and every query of the pass is looked at as it is recorded: there is nothing to take along
        alone = self.limit == 0 or (self.policy.adds_up and run.budget is not None)
        old = None if self.limit == 0 else self._old(run, place)
        if alone and old is None:
            recent = recorded(layer, last_query(record), reader, run.pads, None if spans is None else spans[:, -1:])
        else:
            recent = recorded(layer, record, reader, run.pads, spans)
        if not alone:
            self._join(run, place, reader, recent)
            recent = self._recent(run, place)
        elif old is not None and recent is not None:
            recent = old.followed_by(recent, None)
        if run.budget is None:
            return
        seen = observation(layer, record, reader, recent, latent=latent, pads=run.pads)
        if self.asked:
            run.waiting.append((place, here, seen, None if recent is None else recent.tokens))
        else:
            run.scored.setdefault(place, []).append(self.policy.score(seen, run.budget))

    def _old(self, run: Pass, place: int) -> Recent | None:
        """The queries before this pass; None where those right before it are not known, of a cache that went on elsewhere."""
        layer: Any = entries_of(run.cache.layers[place])
        old = getattr(layer, "recent", None)
        if old is None or int(old.spans[:, -1, 1].amax()) != layer.get_seq_length() - run.tokens - 1:
            return None
        return old

    def _recent(self, run: Pass, place: int) -> Recent | None:
        """The last queries, this pass's and those before."""
        new, old = run.recent.get(place), self._old(run, place)
        if new is None or old is None or not new.queries.keys() <= old.queries.keys():
            return new
        return old.followed_by(new, self.limit)

    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After a pass, or after it raised (`output` is None then): choose, free, and take the last queries along."""
        run = self.running
        if run is None or self.replays or run.thread is not threading.current_thread():
            return
        try:
            if output is None:
                raise _Raised
            if run.order:
                raise UnsupportedAttention(
                    f"{len(run.order)} attention calls of a pass could not be recorded: another handler kept them"
                )
            event = self._settle(run)
        except BaseException as error:
            self.abandon()
            if not isinstance(error, _Raised):
                raise
            return
        if event is not None and self.watch is not None:
            self.watch(event)

    def _settle(self, run: Pass) -> Eviction | None:
        """Choose and free what is not kept; from then on there is no way back."""
        cache = run.cache
        carry = {place: self._recent(run, place) if self.limit != 0 else None for place in run.recent}
        event, masks, carried = None, {}, None
        if run.waiting:
            self._replay(run)
        if run.budget is not None and run.scored:
            places = sorted(run.scored)
            decided = self.policy.decide_all([merged(run.scored[place]) for place in places])
            over = [over_all(cache.layers[place], decision) for place, decision in zip(places, decided, strict=True)]
            masks = {place: decision.keep for place, decision in zip(places, over, strict=True)}
            carried = self._carried(run, places)
            every = range(max(max(self.places) + 1, len(cache.layers)))
            keep = tuple(masks.get(self.places[layer]) if layer in self.places else None for layer in every)
            event = Eviction(cache, cache.get_seq_length(), tuple(over), keep)
        self.running = None
        try:
            layers: list[Any] = list(cache.layers)
            if event is not None:
                kept = [masks.get(place) for place in range(len(layers))]
                layers = compact(layers, kept, padding=run.padding, latent=self.latent, carried=carried, consume=True)
            layers = [watched(layer) for layer in layers]
            for place, layer in enumerate(layers):
                if place in run.readers or place in carry:
                    entries_of(layer).recent = carry.get(place)
                if run.budget is not None and hasattr(entries_of(layer), "looked"):
                    entries_of(layer).looked = length_of(layer)
            cache.layers[:] = layers
        except BaseException:
            break_cache(cache, "an eviction from it was interrupted half done")
            raise
        return event

    def _replay(self, run: Pass) -> None:
        """Run the last tokens again, and score what waited for them."""
        cache, budget = run.cache, run.budget
        assert budget is not None
        require_rerun(cache)
        tokens = run.waiting[0][3]
        if tokens is None:
            raise UnsupportedAttention(
                "the last tokens cannot be run again: what they saw is no span of slots, or they are not known"
            )
        seen = {here: one for _, here, one, _ in run.waiting}
        self.replays = True
        try:
            found = run_again(self.model, self.policy, budget, tokens, seen, length=cache.get_seq_length(), padding=run.padding)
        finally:
            self.replays = False
        for place, here, _, _ in run.waiting:
            run.scored.setdefault(place, []).append(self.policy.score(found[here], budget))
        run.waiting.clear()

    def _carried(self, run: Pass, places: list[int]) -> Mapping[int, Tensor] | None:
        """What each entry was given so far [batch, kv_heads, held, readers · group]."""
        if not self.policy.adds_up:
            return None
        carried = {}
        for place in places:
            layer: Any = run.cache.layers[place]
            heads = layer.keys.shape[1]
            parts = [each.carried.unflatten(1, (heads, -1)) for each in run.scored[place] if each.carried is not None]
            # a sliding window's cache holds the last of those that attention saw
            carried[place] = torch.cat(parts, 2).movedim(2, 3)[:, :, -held_by(layer) :]
        return carried

    def abandon(self) -> None:
        """A pass that did not come to its end is taken back."""
        run, self.running = self.running, None
        if run is not None:
            take_back(run.cache, run.before)
