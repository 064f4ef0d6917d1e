"""One door into the model's attention: every call that transformers dispatches, seen by handlers, undone on exit.

transformers looks its attention function up by name in a registry, at every call. `intercept` overrides the entry of
the name in use, in place, with a function that hands the call to the handlers of the calling module and delegates to
the original. The name stays what it was, so models that branch on it, and the mask built for it, do not change
(ADR 2 says why this and not the alternatives).

The registry belongs to the process; a handler belongs to one model. Calls of modules that no handler was given for go
straight to the original, so that two models in two threads do not see each other.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import AttentionInterface

from hooks.errors import UnsupportedAttention


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call, as the model gave them.

    `query` is [batch, heads, queries, head_dim]; `key` and `value` are [batch, kv_heads, keys, ·], after the cache's
    update and before heads are repeated. `mask` is boolean (True: visible), additive, or None where the kernel's own
    causality is all there is. `options` holds what else was passed (`scaling`, `softcap`, `s_aux`, …).
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | BlockMask | None
    implementation: str
    options: Mapping[str, Any]

    @property
    def softcap(self) -> float | None:
        """The cap that the kernel applies; sdpa leaves out one that a family asks for (Gemma2 in older transformers)."""
        return None if self.implementation == "sdpa" else self.options.get("softcap")

    @property
    def sinks(self) -> Tensor | None:
        """The logits of learned sinks, under either of the names that families give them."""
        sinks = self.options.get("s_aux")
        return self.options.get("sinks") if sinks is None else sinks


AttentionResult = tuple[Tensor, Tensor | None]
Proceed = Callable[[AttentionCall], AttentionResult]
Handler = Callable[[AttentionCall, Proceed], AttentionResult]


@dataclass
class _Override:
    """An entry of one registry while somebody intercepts: who made it, and what it hides."""

    registry: AttentionInterface
    implementation: str
    users: int = 0
    hidden: Callable[..., AttentionResult] | None = field(default=None)

    def install(self) -> None:
        self.hidden = self.registry._local_mapping.get(self.implementation)
        shared = self.registry._global_mapping.get(self.implementation)
        self.registry[self.implementation] = _entry(self.implementation, self.hidden or shared)  # type: ignore[arg-type]

    def remove(self) -> None:
        if self.hidden is None:
            del self.registry[self.implementation]
        else:
            self.registry[self.implementation] = self.hidden


_replaced = threading.local()  # .outputs: id of an attention module -> the output that `replacing` puts in place of attention's
_lock = threading.Lock()
_handlers: dict[int, tuple[Handler, ...]] = {}  # id of an attention module -> its handlers, outermost first
_overrides: dict[tuple[int, str], _Override] = {}  # (id of a registry, implementation) -> its override


def _eager(module: nn.Module) -> Callable[..., AttentionResult]:
    """The eager function that the module's own file falls back to; "eager" has no registry entry."""
    scope = inspect.unwrap(type(module).forward).__globals__
    function = scope.get("eager_attention_forward")
    if function is None:
        file = sys.modules[type(module).__module__]
        function = getattr(file, "eager_attention_forward", None)
    if function is None:
        raise UnsupportedAttention(
            f"{type(module).__name__} runs eager attention, but {type(module).__module__} defines no "
            "eager_attention_forward to delegate to; load the model with attn_implementation='sdpa'"
        )
    return function


def _entry(implementation: str, original: Callable[..., AttentionResult] | None) -> Callable[..., AttentionResult]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | BlockMask | None = None,
        **options: Any,
    ) -> AttentionResult:
        if (given := getattr(_replaced, "outputs", {}).get(id(module))) is not None:
            return given, None
        function = original or _eager(module)

        def delegate(call: AttentionCall) -> AttentionResult:
            return function(call.module, call.query, call.key, call.value, call.mask, **call.options)

        proceed: Proceed = delegate
        for handler in reversed(_handlers.get(id(module), ())):
            proceed = _bind(handler, proceed)
        return proceed(AttentionCall(module, query, key, value, attention_mask, implementation, options))

    return attention


def _bind(handler: Handler, proceed: Proceed) -> Proceed:
    return lambda call: handler(call, proceed)


def _registries(model: nn.Module) -> list[AttentionInterface]:
    """Every registry that the model's files look attention up in; some families hold one of their own."""
    found: dict[int, AttentionInterface] = {}
    for cls in {type(module) for module in model.modules()}:
        for value in inspect.unwrap(cls.forward).__globals__.values():
            if isinstance(value, AttentionInterface):
                found[id(value)] = value
    return list(found.values())


def implementations(model: nn.Module) -> set[str]:
    """The names of the attention implementations that the model's modules ask for, such as {"sdpa"}."""
    names = set()
    for module in model.modules():
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(name, str):
            names.add(name)
    return names


@contextmanager
def intercept(model: nn.Module, handler: Handler, *, first: bool = False) -> Iterator[None]:
    """Hand every dispatched attention call of `model` to `handler(call, proceed)` inside the `with` block.

    A handler returns what attention returns: `proceed(call)` for the model's own result, or `proceed(replace(call, …))`
    for that of a changed call. Handlers of one model nest: the one entered first sees a call first, unless one asks to be
    `first` itself. On exit, after an exception too, the registry holds what it held before.

    Raises:
        UnsupportedAttention: the model's files use no attention registry (it dispatches attention by itself or has none).
    """
    if isinstance(model, OptimizedModule) or any(module._compiled_call_impl is not None for module in model.modules()):
        raise UnsupportedAttention(
            f"{type(model).__name__} is compiled: its attention was traced and is not dispatched any more. Capture the model as it "
            "was before torch.compile (model._orig_mod), or one that model.compile() was not called on"
        )
    registries = _registries(model)
    names = implementations(model)
    if not registries or not names:
        raise UnsupportedAttention(
            f"{type(model).__name__} does not dispatch its attention through transformers' registry, so what it used "
            "cannot be seen; take a family that does, such as Llama, Qwen3, Gemma2 or GPT-2"
        )
    modules = list(model.modules())  # held, so that no id is reused while a handler is listed under it
    wanted = [(registry, name) for registry in registries for name in sorted(names)]
    with _lock:
        for module in modules:
            others = _handlers.get(id(module), ())
            _handlers[id(module)] = (handler, *others) if first else (*others, handler)
        for registry, name in wanted:
            override = _overrides.setdefault((id(registry), name), _Override(registry, name))
            if override.users == 0:
                override.install()
            override.users += 1
    try:
        yield
    finally:
        with _lock:
            for registry, name in wanted:
                override = _overrides[id(registry), name]
                override.users -= 1
                if override.users == 0:
                    override.remove()
                    del _overrides[id(registry), name]
            for module in modules:
                left = list(_handlers[id(module)])
                left.remove(handler)
                if left:
                    _handlers[id(module)] = tuple(left)
                else:
                    del _handlers[id(module)]


@contextmanager
def replacing(module: nn.Module, output: Tensor) -> Iterator[None]:
    """Inside the block and in this thread, `module`'s attention returns `output` without being computed; no handler sees it.

    Only while the module's model is intercepted.
    """
    outputs = _replaced.__dict__.setdefault("outputs", {})
    outputs[id(module)] = output
    try:
        yield
    finally:
        del outputs[id(module)]


def is_intercepted(model: nn.Module) -> bool:
    """Whether any handler is listed for a module of `model`; False again once every `intercept` has been left."""
    return any(id(module) in _handlers for module in model.modules())
