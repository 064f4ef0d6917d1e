"""Record exactly what attention used: queries, keys, values, mask, W_O and hidden states, layer by layer.

Queries, keys and values come from the attention dispatch (`hooks.dispatch`), hidden states and the input of W_O from
forward hooks. Nothing is recomputed, so nothing can differ from what the model did; everything is undone on exit.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hooks.dispatch import AttentionCall, AttentionResult, Proceed, intercept
from hooks.errors import UnsupportedAttention
from hooks.forward import given, tokens_given
from hooks.gates import elementwise_gate
from hooks.hidden import handed_on
from hooks.layers import Layer, decoder_layers, is_attention
from hooks.masks import visible
from hooks.projection import OutputProjection, find_output_projection
from hooks.records import Capture, LayerRecord
from hooks.window import Shared, Window, last_queries

Visitor = Callable[[LayerRecord], None]


@contextmanager
def capture(
    model: nn.Module,
    *,
    window: int | None = 32,
    layers: Collection[int] | None = None,
    visitor: Visitor | None = None,
    offload: bool = False,
    due: Callable[[], bool] | None = None,
) -> Iterator[Capture]:
    """Record every attention call of `model` inside the `with` block.

    Examples:
        >>> with capture(model, window=32) as captured:
        ...     logits = model(tokens, logits_to_keep=1).logits
        >>> captured[0].queries.shape, captured[0].keys.shape  # of 4 query and 2 KV heads
        (torch.Size([1, 4, 32, 8]), torch.Size([1, 2, 48, 8]))

    Args:
        model: a causal language model of transformers whose attention is dispatched through the registry.
        window: how many of the last queries of each pass to keep (of each row, pads apart), or None for all of them. Keys and
            values are always whole: they are references to what attention read, queries and masks are copies of the part kept.
        layers: the decoder layers to record, by their place in the model's list; None records all.
        visitor: called with each layer's record when the layer is done, instead of keeping it.
        offload: move each record to the CPU as it is made, so that the device holds one layer's at a time.
        due: asked before each decoder layer whether it is to be recorded; None records every pass.

    Guarantees: logits are bit for bit those of the pass without capture; everything stays on the model's device (unless `offload`); no
    hook and no override is left on exit, nor after an exception inside the block. Captures nest, and each records everything.

    Raises:
        ValueError: `window` is below 1, or `layers` names a layer that has no attention.
        UnsupportedAttention: the attention is not dispatched, or is compiled.
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 query, not {window}")
    found, beside = decoder_layers(model)
    known = {layer.index for layer in found}
    if layers is not None and (unknown := sorted(set(layers) - known)):
        raise ValueError(f"layers {unknown} do not exist or have no attention: those that have are {sorted(known)}")
    recorder = _Recorder(model, window, visitor, offload, tuple(beside), due)
    handles: list[RemovableHandle] = []
    try:
        handles.append(model.register_forward_pre_hook(recorder.begin, with_kwargs=True))
        for layer in found:
            if layers is None or layer.index in layers:
                handles.append(layer.module.register_forward_pre_hook(recorder.enter(layer), with_kwargs=True))
                handles.append(layer.module.register_forward_hook(recorder.leave))
                for part in filter(is_attention, layer.module.modules()):
                    handles.append(part.register_forward_pre_hook(recorder.arguments, with_kwargs=True))
                    handles.append(part.register_forward_hook(recorder.release))
        with intercept(model, recorder.attend):
            yield recorder.captured
    finally:
        for handle in handles:
            handle.remove()
        recorder.forget()


@dataclass
class _Draft:
    """A record in the making: from the attention call until the decoder layer returns."""

    fields: dict[str, Any]
    hook: RemovableHandle | None = None


@dataclass
class _Frame:
    """A decoder layer that is running."""

    layer: Layer
    hidden_before: Tensor
    drafts: list[_Draft] = field(default_factory=list)
    arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)


class _Recorder:
    """The state of one `capture` block."""

    def __init__(
        self,
        model: nn.Module,
        window: int | None,
        visitor: Visitor | None,
        offload: bool,
        skipped: tuple[str, ...],
        due: Callable[[], bool] | None,
    ) -> None:
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.wanted = window
        self.visitor = visitor
        self.offload = offload
        self.due = due
        self.captured = Capture(skipped=skipped)
        self.calls: Counter[str] = Counter()
        self.padding: Tensor | None = None
        self.tokens: tuple[int, ...] | None = None  # (batch, queries) of the pass, where it is known
        self.frame: _Frame | None = None
        self.hidden = Shared()
        self.masks = Shared()

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the pass: which tokens are pads."""
        called = given(model, args, kwargs)
        mask = called.get("attention_mask")
        self.padding = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        tokens = tokens_given(called)
        self.tokens = None if tokens is None else tuple(tokens.shape[:2])

    def enter(self, layer: Layer) -> Callable[..., None]:
        """Before a decoder layer."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.forget()
            if self.due is not None and not self.due():
                return
            self.frame = _Frame(layer, self._hidden(args[0] if args else kwargs["hidden_states"]))

        return before

    def arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before an attention module: what it was called with, should it have to be asked about a gate."""
        if self.frame is not None:
            self.frame.arguments[id(module)] = (args, kwargs)

    def release(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After an attention module: what it was called with need not be held any longer."""
        if self.frame is not None:
            self.frame.arguments.pop(id(module), None)

    def attend(self, call: AttentionCall, proceed: Proceed) -> AttentionResult:
        """The attention call itself."""
        output, weights = proceed(call)
        frame = self.frame
        if frame is None:
            return output, weights
        name = self.names[id(call.module)]
        batch, heads, queries, head_dim = call.query.shape
        if frame.hidden_before.shape[0] != batch or (self.tokens or (batch, queries)) != (batch, queries):
            raise UnsupportedAttention(
                f"{name} attends over something other than the tokens: {queries} queries in a batch of {batch}, in a pass of "
                f"{self.tokens}; capture takes decoder layers of self-attention, such as Llama's or Qwen3's"
            )
        window = last_queries(self.padding, batch, queries, self.wanted)
        scale = call.options.get("scaling")
        draft = _Draft(
            {
                "name": name,
                "call": self.calls[name],
                "layer": frame.layer.index,
                "window": window,
                "queries": window.take(call.query, 2),
                "keys": call.key.detach(),
                "values": call.value.detach(),
                "scale": float(scale if scale is not None else head_dim**-0.5),
                "mask": self._mask(call, window),
                "query_valid": window.valid
                if window.valid is not None
                else torch.ones(batch, window.count, dtype=torch.bool, device=call.query.device),
                "softcap": call.softcap,
                "sinks": window_sinks(call, window),
                "attention_output": window.take(output, 1),
            }
        )
        self.calls[name] += 1
        frame.drafts.append(draft)
        try:
            projection = find_output_projection(self.model, name, heads * call.value.shape[-1])
        except UnsupportedAttention as error:
            draft.fields["refusal"] = str(error)
        else:
            draft.fields["output_projection"] = projection
            draft.hook = projection.module.register_forward_hook(self._projected(draft, call.module, output, projection))
        return output, weights

    def _projected(
        self, draft: _Draft, attention: nn.Module, output: Tensor, projection: OutputProjection
    ) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            if not isinstance(result, Tensor):
                return
            # nothing that this hook holds, whole tensors among it, outlives attention
            assert draft.hook is not None
            draft.hook.remove()
            assert self.frame is not None
            called = self.frame.arguments.get(id(attention))
            window: Window = draft.fields["window"]
            leading = output.shape[:2]
            given = args[0].reshape(*leading, -1)
            draft.fields["projected_output"] = window.take(result.reshape(*leading, -1), 1)
            if given.shape == output.flatten(2).shape and torch.equal(given, output.flatten(2)):
                return
            try:
                if called is None:
                    raise UnsupportedAttention(f"{draft.fields['name']} was called in a way that cannot be repeated")
                gate = elementwise_gate(attention, *called, projection, output, given)
                draft.fields["gate"] = window.take(gate, 1).transpose(1, 2)
            except UnsupportedAttention as error:
                draft.fields["refusal"] = str(error)

        return after

    def leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After a decoder layer: its records are whole."""
        frame = self.frame
        if frame is None or frame.layer.module is not layer:
            return
        after = self._hidden(output)
        self.forget()
        for draft in frame.drafts:
            fields = draft.fields
            fields.pop("window")
            if fields.get("projected_output") is None and "refusal" not in fields:
                fields["refusal"] = (
                    f"{fields['name']} never called {fields['output_projection'].name} with its attention output"
                )
            defaults = {"gate": None, "projected_output": None, "output_projection": None}
            record = LayerRecord(
                **{**defaults, **fields},
                hidden_before=frame.hidden_before,
                hidden_after=after,
            )
            record = record.to("cpu") if self.offload else record
            if self.visitor is None:
                self.captured.records.append(record)
            else:
                self.visitor(record)

    def _hidden(self, handed: Any) -> Tensor:
        """The window of what a layer gets or returns."""
        hidden = handed_on(handed, self.tokens)
        batch, queries = hidden.shape[:2]
        # what one layer returns is, as a rule, what the next one gets
        return self.hidden(last_queries(self.padding, batch, queries, self.wanted).part(hidden, 1))

    def _mask(self, call: AttentionCall, window: Window) -> Tensor:
        """The window's rows of the mask; rows of queries that are pads see everything, since they mean nothing."""
        if window.index is None:
            return self.masks(visible(call, window.count).detach())
        mask = window.part(visible(call), 2)
        assert window.valid is not None
        pads = ~window.valid[:, None, :, None]
        return self.masks(mask | pads if mask.dtype == torch.bool else mask.masked_fill(pads, 0))

    def forget(self) -> None:
        """Drop what a layer left unfinished, its hooks on W_O included."""
        if self.frame is not None:
            for draft in self.frame.drafts:
                if draft.hook is not None:
                    draft.hook.remove()
        self.frame = None


def window_sinks(call: AttentionCall, window: Window) -> Tensor | None:
    """The logits of the learned sinks: one a head, or one a head and query."""
    sinks = call.sinks
    if sinks is None:
        return None
    return sinks.detach() if sinks.dim() == 1 else window.take(sinks.squeeze(-1), 2)
