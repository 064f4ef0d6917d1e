"""What leaves the decoder layers, whatever their attention reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hooks.forward import given, tokens_given
from hooks.layers import decoder_layers


def handed_on(output: Any, tokens: tuple[int, ...] | None) -> Tensor:
    """The hidden states that a decoder layer gets or returns [batch, queries, *streams, model_dim].

    Some families return them in a tuple, some put their streams first; `tokens` is (batch, queries) of the pass, where it is known.
    """
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden.movedim(0, 2) if hidden.dim() == 4 and hidden.shape[1:3] == tokens else hidden


@contextmanager
def hidden_states(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Inside the `with` block, what each decoder layer with attention hands on is noted, by its place: that of the last pass.

    As `LayerRecord.hidden_after` of all tokens, but without a look at attention, so that it works on any cache. No hook is left on exit, nor
    after an exception inside the block.

    Raises:
        UnsupportedAttention: the model has no list of layers with attention in it.
    """
    found: dict[int, Tensor] = {}
    tokens: tuple[int, ...] | None = None

    def begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal tokens
        run = tokens_given(given(model, args, kwargs))
        tokens = None if run is None else tuple(run.shape[:2])

    def leave(layer: int) -> Any:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found[layer] = handed_on(output, tokens)

        return after

    handles: list[RemovableHandle] = []
    try:
        handles.append(model.register_forward_pre_hook(begin, with_kwargs=True))
        for layer in decoder_layers(model)[0]:
            handles.append(layer.module.register_forward_hook(leave(layer.index)))
        yield found
    finally:
        for handle in handles:
            handle.remove()
