"""Where a model's decoder layers and attention modules are, by the structure that all families share."""

import re
from dataclasses import dataclass

from torch import nn

from hooks.errors import UnsupportedAttention


@dataclass(frozen=True)
class Layer:
    """A decoder layer: its qualified name, its place in its list, and the module."""

    name: str
    index: int
    module: nn.Module


def is_attention(module: nn.Module) -> bool:
    """Whether the class calls itself attention (a layer that does holds it); all that dispatch it do."""
    name = type(module).__name__
    return bool(re.search(r"Attention|MLA", name)) and not re.search(r"(Layer|Block)$", name)


def decoder_layers(model: nn.Module) -> tuple[list[Layer], list[str]]:
    """The layers that hold attention, in order, and the names of those beside them that do not.

    A layer is the innermost entry of a ModuleList that holds an attention module without being one.

    Raises:
        UnsupportedAttention: there is no such layer.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    found, beside = [], []
    for name, stack in lists.items():
        if not any(_holds(entry) for entry in stack):
            continue
        for index, entry in enumerate(stack):
            place = f"{name}.{index}"
            deeper = any(other.startswith(f"{place}.") and any(map(_holds, lists[other])) for other in lists)
            if _holds(entry) and not deeper:
                found.append(Layer(place, index, entry))
            elif not _holds(entry):
                beside.append(place)
    if not found:
        raise UnsupportedAttention(
            f"{type(model).__name__} has no list of layers with attention in it; capture takes decoder models such as "
            "Llama, Qwen3 or GPT-2"
        )
    return found, beside


def _holds(entry: nn.Module) -> bool:
    return not is_attention(entry) and any(is_attention(part) for part in entry.modules())
