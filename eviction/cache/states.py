"""What a ragged layer hands to the model in place of keys and values: tensors that cannot be mistaken for all of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hooks.errors import UnsupportedAttention

if TYPE_CHECKING:
    from eviction.cache.ragged import RaggedLayer

OUTSIDE = (
    "this cache holds different numbers of entries per head, and only attention inside `with eviction.reading(model):` can read it "
    "(eviction.generate does that by itself), of a family that leaves keys and values as they are until then, and not under torch.compile"
)
ATTRIBUTES = frozenset({"__get__", "size", "dim", "__repr__"})
EXPANDING = frozenset(
    {
        *("linear", "view", "reshape", "transpose", "split", "split_with_sizes", "chunk", "expand", "contiguous", "to"),
        *("unsqueeze", "squeeze", "flatten", "unflatten", "new_empty", "copy_", "cat", "__getitem__", "__setitem__"),
    }
)
"""What a model does to latent states to make keys and values of them: projections of each entry by itself, and no attention."""


class LayerStates(Tensor):
    """States that know the `layer` that they are a part of."""

    layer: "RaggedLayer"

    @classmethod
    def of(cls, states: Tensor, layer: "RaggedLayer") -> Any:
        """`states`, known to be those of `layer`."""
        made = states.as_subclass(cls)
        made.layer = layer
        return made


class RaggedStates(LayerStates):
    """The entries written since the eviction, and the `layer` that has the rest.

    It answers for its shape and dtype; every computation with it is refused, since it would leave the kept entries out.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Attributes are answered, and moves to where it is; nothing else is.

        Raises:
            UnsupportedAttention: something computes with the states outside of `reading`.
        """
        name = getattr(func, "__name__", "")
        if name in ATTRIBUTES or name == "to":
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            if name != "to" or result is args[0]:
                return result
        raise UnsupportedAttention(OUTSIDE)


class LatentStates(LayerStates):
    """Entries of a `layer` side by side, gaps among them, for a model that makes keys and values of them before attention.

    What is made of them knows the layer too, so that attention inside `reading` hides the gaps; attention elsewhere is refused.
    """

    @property
    def plain(self) -> Tensor:
        """The tensor without its knowledge."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Projections and reshapes are carried out, and their results know the layer.

        Raises:
            UnsupportedAttention: something else computes with the states outside of `reading`.
        """
        name = getattr(func, "__name__", "")
        if name in ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name not in EXPANDING:
            raise UnsupportedAttention(f"{OUTSIDE}; {name} was called with its latent states")
        layer = next(part.layer for part in _flat(args) if isinstance(part, LatentStates))
        result = super().__torch_function__(func, types, args, kwargs or {})
        for part in _flat(result):
            if isinstance(part, LatentStates):
                part.layer = layer
        return result


def _flat(parts: Any) -> list[Any]:
    return [inner for part in parts for inner in _flat(part)] if isinstance(parts, list | tuple) else [parts]
