"""Change what attention sees, without changing the cache: the masked reference that every compressed cache must equal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hooks.dispatch import AttentionCall, AttentionResult, Proceed, intercept
from hooks.errors import UnsupportedAttention
from hooks.forward import cache_given, given, tokens_given
from hooks.layers import decoder_layers
from hooks.masks import over_keys, restricted, visible


@contextmanager
def hiding(
    model: nn.Module, keep: Sequence[Bool[Tensor, "batch _ prompt"] | None] | Mapping[int, Bool[Tensor, "batch _ prompt"]]
) -> Iterator[None]:
    """Inside the `with` block, attention does not see the entries that `keep` (one mask per decoder layer) leaves out.

    `keep[l][b, k, i]` says whether entry i of KV head k in layer l stays visible to row b; a mask with one head is for all of them (latent
    attention caches one). Entries beyond the masks, those written after the prompt, stay visible. Attention renormalises over what it
    sees, which is eviction without freeing memory. The cache itself is untouched. Layers are counted by their place in the model's list;
    those without attention have None. Of a mapping, layers that are not in it see everything.

    Examples:
        >>> odd = (torch.arange(48) % 2 == 1).expand(1, 2, 48)
        >>> with hiding(model, {0: odd}):
        ...     hidden = model(tokens).logits
        >>> bool((hidden == model(tokens).logits).all())
        False

    Raises:
        ValueError: a mask does not fit the batch, the KV heads or the tokens seen; or there is no mask for a layer.
        UnsupportedAttention: the attention is not dispatched, is compiled, or takes no mask per head.
    """
    found, _ = decoder_layers(model)
    place = _Place()
    handles = [model.register_forward_pre_hook(place.begin, with_kwargs=True)]

    def hide(call: AttentionCall, proceed: Proceed) -> AttentionResult:
        if call.implementation not in ("sdpa", "eager"):
            raise UnsupportedAttention(
                f"entries cannot be hidden per head under '{call.implementation}', whose mask is the same for every head; load the model with "
                "attn_implementation='sdpa' or 'eager'"
            )
        layer = place.layer
        if layer is None or (isinstance(keep, Mapping) and layer not in keep):
            return proceed(call)
        chosen = keep[layer] if isinstance(keep, Mapping) or layer < len(keep) else None
        if chosen is None:
            raise ValueError(f"layer {layer} calls attention, but there is no keep-mask for it ({len(keep)} masks are given)")
        batch, heads = call.query.shape[:2]
        kv_heads, keys = call.key.shape[1:3]
        seen = keys if place.seen is None else max(place.seen, keys)
        if chosen.shape[0] != batch or chosen.shape[1] not in (1, kv_heads) or chosen.shape[2] > seen:
            raise ValueError(
                f"layer {layer}: a keep-mask {tuple(chosen.shape)} does not fit keys [batch {batch}, KV heads {kv_heads}, "
                f"keys {seen}]"
            )
        chosen = over_keys(chosen, seen, keys)
        chosen = chosen.repeat_interleave(heads // chosen.shape[1], dim=1)[:, :, None]
        return proceed(restricted(call, visible(call), chosen))

    try:
        handles += [layer.module.register_forward_pre_hook(place.enter(layer.index)) for layer in found]
        with intercept(model, hide):
            yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Place:
    """Where a pass is: its layer, and how many tokens it and its cache have seen."""

    layer: int | None = None
    seen: int | None = None

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the pass."""
        called = given(model, args, kwargs)
        cache, tokens = cache_given(called), tokens_given(called)
        self.layer = None
        self.seen = None if not isinstance(cache, Cache) or tokens is None else cache.get_seq_length() + tokens.shape[1]

    def enter(self, index: int) -> Callable[..., None]:
        """Before a decoder layer."""

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.layer = index

        return before


@contextmanager
def replaying(model: nn.Module, outputs: Mapping[int, Any]) -> Iterator[None]:
    """Inside the `with` block, the decoder layers that `outputs` names return what it has for them and compute nothing.

    What lies below a change need not be run again: its outputs, recorded before, take its place. Layers are counted by their place in
    the model's list. They do not write to a cache.

    Raises:
        ValueError: a layer does not exist or has no attention.
    """
    found = {layer.index: layer.module for layer in decoder_layers(model)[0]}
    if unknown := sorted(set(outputs) - set(found)):
        raise ValueError(f"layers {unknown} do not exist or have no attention: those that have are {sorted(found)}")
    own = {index: found[index].__dict__.get("forward") for index in outputs}

    def stub(output: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: output

    try:
        for index, output in outputs.items():
            object.__setattr__(found[index], "forward", stub(output))
        yield
    finally:
        for index, before in own.items():
            if before is None:
                found[index].__dict__.pop("forward", None)
            else:
                object.__setattr__(found[index], "forward", before)


@dataclass
class Apart:
    """What left each decoder layer, in order, and what the final norm got of the last."""

    outputs: list[Tensor] = field(default_factory=list)
    last: Tensor | None = None


@contextmanager
def apart(model: nn.Module) -> Iterator[Apart]:
    """Inside the `with` block no gradient passes from one decoder layer to the next, nor from the last to what follows it.

    Each layer's output is kept with the graph that leads to it, and a leaf that requires a gradient goes on in its place.

    Raises:
        UnsupportedAttention: a layer hands on more than one hidden state, or not all layers hold attention.
    """
    layers, beside = decoder_layers(model)
    if beside:
        raise UnsupportedAttention(
            f"layers {', '.join(beside)} have no attention; the model cannot be taken apart layer by layer"
        )
    found = Apart()

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() != 3:
            raise UnsupportedAttention(f"{type(module).__name__} hands on more than one hidden state; it cannot be taken apart")
        found.outputs.append(output)
        found.last = output.detach().requires_grad_()
        return found.last

    handles = []
    try:
        for layer in layers:
            handles.append(layer.module.register_forward_hook(leave))
        yield found
    finally:
        for handle in handles:
            handle.remove()
