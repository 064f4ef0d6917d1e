"""What stands between attention and W_O: nothing, an elementwise gate, or something that couples the heads.

A gate multiplies each component of the attention output by a factor that does not depend on it. A norm does depend on it. From
one pass they look alike, so the module is asked: its forward is run again on the same input with attention's output replaced, and
stopped where W_O would begin.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hooks.dispatch import replacing
from hooks.errors import UnsupportedAttention
from hooks.projection import OutputProjection

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


class _Reached(Exception):
    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs


def elementwise_gate(
    attention: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    projection: OutputProjection,
    output: Tensor,
    given: Tensor,
) -> Tensor:
    """The factor g with W_O's input = g ⊙ attention output, in the output's shape [batch, queries, heads, value_dim].

    Args:
        attention: the attention module, called with `args` and `kwargs`.
        projection: its W_O.
        output: what attention returned.
        given: what reached W_O.

    Raises:
        UnsupportedAttention: what reaches W_O is not such a product (a norm couples the components, an offset is added), or the module
            cannot be run again; the message says which.
    """
    name = type(attention).__name__
    reached = projection.name
    couples = (
        f"{name}: what reaches its output projection {reached} is not the attention output, nor a product of it with a gate that does not "
        "depend on it (a norm stands between, say); the heads are coupled, and no head has a perturbation of its own. Layer-level numbers by "
        "the forward pass still mean what they say"
    )
    if given.numel() != output.numel():
        raise UnsupportedAttention(couples)

    def reaching(value: Tensor) -> Tensor:
        return _reaching(attention, args, kwargs, projection, value).reshape(output.shape)

    try:
        gate = reaching(torch.ones_like(output))
        other = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        answer, nothing = reaching(other), reaching(torch.zeros_like(output))
    except _Unreachable as error:
        raise UnsupportedAttention(f"{couples} ({error})") from error
    allowed = 8 * torch.finfo(output.dtype).eps
    expected, actual = gate * output, given.reshape(output.shape)
    products = ((gate * other, answer), (expected, actual), (torch.zeros_like(output), nothing))
    for product, real in products:
        if (product - real).norm() > allowed * (real.norm() + torch.finfo(output.dtype).tiny):
            raise UnsupportedAttention(couples)
    return gate


class _Unreachable(Exception):
    pass


def _reaching(
    attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], projection: OutputProjection, value: Tensor
) -> Tensor:
    """What would reach W_O if attention returned `value`."""

    def stop(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        raise _Reached(inputs[0].detach())

    handle = projection.module.register_forward_pre_hook(stop, prepend=True)
    try:
        with torch.no_grad(), replacing(attention, value):
            attention.forward(*args, **{name: None if name in CACHES else entry for name, entry in kwargs.items()})
    except _Reached as reached:
        return reached.inputs
    except Exception as error:
        raise _Unreachable(f"running it again without a cache failed: {type(error).__name__}: {error}") from error
    finally:
        handle.remove()
    raise _Unreachable(f"its forward does not call {projection.name}")
