"""W_O, the matrix that carries each head's output into the residual stream, as blocks per head."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hooks.errors import UnsupportedAttention

# The names under which the families of transformers keep W_O in their attention module, the commonest first.
NAMES = ("o_proj", "dense", "out_proj", "c_proj", "Wo", "wo", "out_lin", "output")


@dataclass(frozen=True)
class OutputProjection:
    """W_O where the model keeps it: nothing is copied until `blocks` is asked for."""

    name: str
    module: nn.Linear | Conv1D

    @property
    def bias(self) -> Float[Tensor, " model_dim"] | None:
        """What W_O adds to the sum over heads, where it has one."""
        return None if self.module.bias is None else self.module.bias.detach()

    def blocks(self, n_heads: int) -> Float[Tensor, "heads value_dim model_dim"]:
        """W_h for each head: the rows h·d_v … (h+1)·d_v of W_O, so that Σ_h o_h W_h (+ bias) is the layer's output.

        Raises:
            ValueError: the input width of W_O is no multiple of `n_heads`.
        """
        weight = self.module.weight.detach()
        rows = weight if isinstance(self.module, Conv1D) else weight.t()  # Conv1D stores [in, out]
        width = rows.shape[0]
        if width % n_heads:
            raise ValueError(f"W_O ({self.name}) takes {width} inputs, which {n_heads} heads do not divide evenly")
        return rows.unflatten(0, (n_heads, width // n_heads))


def find_output_projection(attention: nn.Module) -> OutputProjection:
    """W_O of an attention module: its Linear or Conv1D child under one of the names that families use.

    Raises:
        UnsupportedAttention: it has none, or one of another kind.
    """
    for name in NAMES:
        child = getattr(attention, name, None)
        if isinstance(child, nn.Linear | Conv1D) and child.weight.dim() == 2:
            return OutputProjection(name, child)
        if isinstance(child, nn.Module):
            raise UnsupportedAttention(
                f"the output projection {type(attention).__name__}.{name} is a {type(child).__name__}; "
                "Linear and Conv1D are read: load the model unquantised and without adapters"
            )
    raise UnsupportedAttention(
        f"{type(attention).__name__} has no output projection under any of the names {', '.join(NAMES)}, so what a head "
        "contributes to the residual stream is unknown; take a family that has one, such as Llama, Qwen3 or GPT-2"
    )
