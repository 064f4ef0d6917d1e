"""Eviction inside whatever runs a model: `with evicting(model, policy, budget): model.generate(…)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.cache_utils import DynamicCache

from eviction.allocate import require_budget
from eviction.cache import EvictedCache
from eviction.evictor import Evictor
from eviction.moments import Moments
from eviction.passes import Watch
from eviction.places import require_places
from eviction.policy import Policy
from hooks.capture import capture
from hooks.compiled import is_compiled, uncompiled
from hooks.dispatch import intercept


@contextmanager
def evicting(
    model: nn.Module, policy: Policy, budget: int | float, when: Moments | None = None, *, watch: Watch | None = None
) -> Iterator[None]:
    """Inside the block, what runs `model` runs it on caches that `policy` evicts from: `model(…)`, `model.generate(…)`, a pipeline.

    Examples:
        >>> from eviction import policy
        >>> with evicting(model, policy("adakv", window=8), 20, Moments(every=4)):
        ...     answer = model.generate(tokens, max_new_tokens=12, do_sample=False)
        >>> answer.shape
        torch.Size([1, 60])

    At each of the moments (`when`; by default after every pass of several tokens) the policy looks at the last queries that the cache has seen,
    those of earlier passes among them, and at the entries that are left; what it does not keep is freed, in the cache that the caller has.
    Decoding then equals that on the full cache with the evicted entries masked from then on, up to float rounding. Caches of any number may
    take turns, and go on outside the block (inside `with reading(model):`, where budgets differ). Any kernel, any batch padded on the left.

    After an exception nothing is left on the model, and a cache that a pass was writing to is as before that pass, or where that cannot be
    (linear states, an eviction half done) says so at its next use; after an interrupt so from the next pass or the end of the block on.
    A block is for one thread at a time.

    Args:
        model: a causal language model of transformers. One that was compiled in place (`model.compile()`, `model.forward = torch.compile(…)`)
            runs compiled in passes at which the policy need not look, on caches whose budgets do not differ; others run it as it was. Where
            nothing is chosen while decoding, queries of compiled passes are not known to a later turn.
        policy: what is kept. One that looks at all queries (H2O) adds up those of each pass that it looks after, and decoded ones where
            `every` is set.
        budget: entries per KV head, or a fraction of those that a row would have in that layer (pads apart, within a sliding window).
        when: the moments.
        watch: called with each `Eviction`.

    Raises:
        BudgetError: the budget is outside its range.
        ValueError: the model is inside such a block already; in a pass: there is no cache, or the attention mask does
            not fit, pads on the right or is not [batch, tokens].
        UnsupportedAttention: the model's attention or a cache cannot be evicted from.
    """
    with driving(model, policy, budget, when or Moments(), watch):
        yield


@contextmanager
def driving(
    model: nn.Module, policy: Policy, budget: int | float, moments: Moments, watch: Watch | None = None
) -> Iterator[Evictor]:
    """`evicting`, for who decides pass by pass whether a choice follows it."""
    require_budget(budget)
    require_places(model)
    EvictedCache.require_support(DynamicCache(config=model.config))  # type: ignore[arg-type]
    at_work = [*model._forward_pre_hooks.values(), model._compiled_call_impl]
    if any(isinstance(getattr(hook, "__self__", None), Evictor) for hook in at_work):
        raise ValueError("the model is inside an evicting block already; give one block all of its moments")
    evictor = Evictor(model, policy, budget, moments, watch)
    with (_between if is_compiled(model) else _hooked)(model, evictor):
        yield evictor


@contextmanager
def _hooked(model: nn.Module, evictor: Evictor) -> Iterator[None]:
    handles: list[Any] = []
    try:
        handles.append(model.register_forward_pre_hook(evictor.begin, with_kwargs=True))
        handles.append(model.register_forward_hook(evictor.end, always_call=True))
        with _seeing(model, evictor):
            yield
    finally:
        for handle in handles:
            handle.remove()
        evictor.abandon()


@contextmanager
def _between(model: nn.Module, evictor: Evictor) -> Iterator[None]:
    """Of a compiled model: no hook, which would be traced, but a decision at each call which of the two it is that runs."""
    own = "_compiled_call_impl" in model.__dict__
    before = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        if evictor.replays:
            with uncompiled(model):
                return model(*args, **kwargs)
        args, kwargs = evictor.begin(model, args, kwargs)
        output = None
        try:
            if evictor.sees():
                with uncompiled(model), _seeing(model, evictor):
                    output = model(*args, **kwargs)
            else:
                output = (before or model._call_impl)(*args, **kwargs)
        finally:
            evictor.end(model, args, output)
        return output

    call.__self__ = evictor  # type: ignore[attr-defined]
    object.__setattr__(model, "_compiled_call_impl", call)
    try:
        yield
    finally:
        if own:
            object.__setattr__(model, "_compiled_call_impl", before)
        else:
            object.__delattr__(model, "_compiled_call_impl")
        evictor.abandon()


@contextmanager
def _seeing(model: nn.Module, evictor: Evictor) -> Iterator[None]:
    with (
        intercept(model, evictor.attend, first=True),  # before a reading block around this one, which would not let it see
        capture(model, window=evictor.window, visitor=evictor.look, due=evictor.looks),
        intercept(model, evictor.compute),
    ):
        yield
