"""What leaves the decoder layers, whatever their attention reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hooks.layers import decoder_layers


@contextmanager
def hidden_states(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Inside the `with` block, the output of each decoder layer with attention is noted, by its place: that of the last pass.

    Unlike `capture` it does not look at attention, so that it works on any cache. No hook is left on exit, nor after an exception inside the
    block.

    Raises:
        UnsupportedAttention: the model has no list of layers with attention in it.
    """
    found: dict[int, Tensor] = {}

    def leave(layer: int) -> Any:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found[layer] = output[0] if isinstance(output, tuple) else output

        return after

    handles = []
    try:
        for layer in decoder_layers(model)[0]:
            handles.append(layer.module.register_forward_hook(leave(layer.index)))
        yield found
    finally:
        for handle in handles:
            handle.remove()
