"""Record exactly what attention used: queries, keys, values, mask, W_O and hidden states, layer by layer.

Queries, keys and values come from the attention dispatch (`hooks.dispatch`), hidden states and the input of W_O from
forward hooks. Nothing is recomputed, so nothing can differ from what the model did; everything is undone on exit.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hooks.dispatch import AttentionCall, AttentionResult, Proceed, intercept, visible
from hooks.errors import UnsupportedAttention
from hooks.projection import OutputProjection, find_output_projection
from hooks.records import Capture, LayerRecord

Visitor = Callable[[LayerRecord], None]


@contextmanager
def capture(
    model: nn.Module,
    *,
    window: int | None = 32,
    layers: Collection[int] | None = None,
    visitor: Visitor | None = None,
) -> Iterator[Capture]:
    """Record every attention call of `model` inside the `with` block.

    >>> with capture(model, window=32) as captured:          # doctest: +SKIP
    ...     model(input_ids, logits_to_keep=1)
    >>> captured[0].queries.shape                             # doctest: +SKIP
    torch.Size([1, 9, 32, 64])

    Args:
        model: a causal language model of transformers whose attention is dispatched through the registry.
        window: how many of the last queries of each pass to keep, or None for all of them. Keys and values are always
            whole: they are references to what attention read, queries and masks are copies of the part kept.
        layers: the decoder layers to record, counted from 0 in the order of the pass; None records all.
        visitor: called with each layer's record when the layer is done, instead of keeping it.

    Guarantees: logits are bit for bit those of the pass without capture; everything stays on the model's device; no hook
    and no override is left on exit, nor after an exception inside the block.

    Raises:
        ValueError: `window` is below 1, or `layers` names a layer that the model does not have.
        UnsupportedAttention: the attention is not dispatched, or what reaches W_O is not the attention output.
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 query, not {window}")
    stacks = _decoder_layers(model)
    if layers is not None and (unknown := sorted(set(layers) - set(range(len(stacks))))):
        raise ValueError(f"layers {unknown} do not exist: the model has {len(stacks)}, counted from 0")
    recorder = _Recorder(model, window, layers, visitor)
    handles: list[RemovableHandle] = []
    try:
        for index, layer in enumerate(stacks):
            handles.append(layer.register_forward_pre_hook(recorder.enter(index), with_kwargs=True))
            handles.append(layer.register_forward_hook(recorder.leave))
        with intercept(model, recorder.attend):
            yield recorder.captured
    finally:
        for handle in handles:
            handle.remove()
        recorder.forget()


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that stand in the model's layer lists and hold attention, in order."""
    found = []
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList):
            found += [layer for layer in stack if any("attention" in type(part).__name__.lower() for part in layer.modules())]
    if not found:
        raise UnsupportedAttention(
            f"{type(model).__name__} has no list of layers with attention in it; capture takes decoder models such as "
            "Llama, Qwen3 or GPT-2"
        )
    return found


class _Draft:
    """A record in the making: from the attention call until the decoder layer returns."""

    def __init__(self, hidden_before: Tensor):
        self.hidden_before = hidden_before
        self.fields: dict[str, Any] | None = None
        self.hook: RemovableHandle | None = None


class _Recorder:
    """The state of one `capture` block."""

    def __init__(self, model: nn.Module, window: int | None, layers: Collection[int] | None, visitor: Visitor | None) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.window = window
        self.layers = layers
        self.visitor = visitor
        self.captured = Capture()
        self.calls: Counter[str] = Counter()
        self.current: _Draft | None = None

    def enter(self, index: int) -> Callable[..., None]:
        def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.forget()
            if self.layers is not None and index not in self.layers:
                return
            hidden = args[0] if args else kwargs["hidden_states"]
            self.current = _Draft(self._tail(hidden, 1))
            self.layer = index

        return before

    def attend(self, call: AttentionCall, proceed: Proceed) -> AttentionResult:
        output, weights = proceed(call)
        draft = self.current
        if draft is None:
            return output, weights
        name = self.names[id(call.module)]
        if draft.fields is not None:
            raise UnsupportedAttention(
                f"one layer called attention twice ({draft.fields['name']}, then {name}); capture takes decoder-only "
                "layers with one self-attention each"
            )
        projection = find_output_projection(call.module)
        kept = min(self.window or call.query.shape[2], call.query.shape[2])
        scale = call.options.get("scaling")
        draft.fields = {
            "name": name,
            "call": self.calls[name],
            "layer": self.layer,
            "queries": self._tail(call.query, 2),
            "keys": call.key.detach(),
            "values": call.value.detach(),
            "scale": float(scale if scale is not None else call.query.shape[-1] ** -0.5),
            "mask": visible(call, kept).detach().clone(),
            "softcap": call.options.get("softcap"),
            "sinks": _sinks(call),
            "output_projection": projection,
        }
        self.calls[name] += 1
        draft.hook = projection.module.register_forward_hook(self._projected(draft, output, projection))
        return output, weights

    def _projected(self, draft: _Draft, output: Tensor, projection: OutputProjection) -> Callable[..., None]:
        expected = self._tail(output, 1)  # [batch, queries, heads, value_dim]

        def after(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
            assert draft.fields is not None
            given = self._tail(args[0].reshape(*expected.shape[:1], -1, args[0].shape[-1]), 1)
            if given.shape != expected.flatten(2).shape or not torch.equal(given, expected.flatten(2)):
                raise UnsupportedAttention(
                    f"{draft.fields['name']}: what reaches its output projection {projection.name} is not the attention "
                    "output (a gate or a norm stands between), so W_O alone does not say what a head contributes"
                )
            draft.fields["attention_output"] = expected
            draft.fields["projected_output"] = self._tail(result, 1)

        return after

    def leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        draft = self.current
        if draft is None or draft.fields is None:
            return
        fields = draft.fields
        hidden = output[0] if isinstance(output, tuple) else output
        if "attention_output" not in fields:
            raise UnsupportedAttention(
                f"{fields['name']} never called its output projection {fields['output_projection'].name}"
            )
        record = LayerRecord(hidden_before=draft.hidden_before, hidden_after=self._tail(hidden, 1), **fields)
        self.forget()
        if self.visitor is None:
            self.captured.records.append(record)
        else:
            self.visitor(record)

    def forget(self) -> None:
        """Drop what a layer left unfinished, its hook on W_O included."""
        if self.current is not None and self.current.hook is not None:
            self.current.hook.remove()
        self.current = None

    def _tail(self, tensor: Tensor, dim: int) -> Tensor:
        """The last `window` positions along `dim`, copied where that lets go of the rest."""
        tensor = tensor.detach()
        length = tensor.shape[dim]
        if self.window is None or self.window >= length:
            return tensor
        return tensor.narrow(dim, length - self.window, self.window).clone()


def _sinks(call: AttentionCall) -> Tensor | None:
    sinks = call.options.get("s_aux")
    if sinks is None:
        sinks = call.options.get("sinks")
    return None if sinks is None else sinks.detach()
