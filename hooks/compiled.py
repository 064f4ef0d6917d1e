"""Run a compiled model as it was before: what was traced cannot be hooked."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it was compiled in place: `module.compile()`, or `module.forward = torch.compile(module.forward)`.

    What `torch.compile(model)` returns is another module, which this is not said of.
    """
    return not isinstance(model, OptimizedModule) and any(_parts(model))


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside the block the model runs as it was before it was compiled."""
    parts = list(_parts(model))
    before = [(module, name, module.__dict__[name]) for module, name, _ in parts]
    try:
        for module, name, original in parts:
            object.__setattr__(module, name, original)
        yield
    finally:
        for module, name, value in before:
            object.__setattr__(module, name, value)


def _parts(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Modules, the attribute that is compiled, and what it was."""
    for module in model.modules():
        if module.__dict__.get("_compiled_call_impl") is not None:
            yield module, "_compiled_call_impl", None
        if (original := getattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable", None)) is not None:
            yield module, "forward", original
