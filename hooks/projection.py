"""W_O, the matrix that carries each head's output into the residual stream, as blocks per head."""

from dataclasses import dataclass
from operator import attrgetter

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hooks.errors import UnsupportedAttention

# The names under which the families of transformers keep W_O, seen from the attention module, the commonest first.
NAMES = ("o_proj", "dense", "out_proj", "c_proj", "Wo", "wo", "out_lin", "output.dense")


@dataclass(frozen=True)
class OutputProjection:
    """W_O where the model keeps it: nothing is copied until `blocks` is asked for.

    `width` is the number of its inputs, heads · value_dim.
    """

    name: str
    module: nn.Module
    width: int

    @property
    def plain(self) -> bool:
        """Whether the weight can be read as it is; else W_O is found by asking the module what it does to the identity."""
        if type(self.module) not in (nn.Linear, Conv1D):
            return False
        return self.module.weight.is_floating_point() and not self.module.weight.is_meta  # type: ignore[union-attr, operator]

    @property
    def bias(self) -> Float[Tensor, " model_dim"] | None:
        """What W_O adds to the sum over heads, where it has one."""
        if self.plain:
            bias = self.module.bias
            return None if bias is None else bias.detach()  # type: ignore[union-attr, return-value, operator]
        added = self._probe(self._zeros(1))[0]
        return added if bool(added.any()) else None

    def blocks(self, n_heads: int) -> Float[Tensor, "heads value_dim model_dim"]:
        """W_h for each head: the rows h·d_v … (h+1)·d_v of W_O, so that Σ_h o_h W_h (+ bias) is the layer's output.

        A view of the weight of a Linear or Conv1D. Of any other module (quantised, with an adapter, sharded) the matrix is what it
        makes of the identity, less what it makes of 0, which is checked on a random input.

        Raises:
            ValueError: the input width of W_O is no multiple of `n_heads`.
            UnsupportedAttention: the module is not an affine map.
        """
        if self.width % n_heads:
            raise ValueError(f"W_O ({self.name}) takes {self.width} inputs, which {n_heads} heads do not divide evenly")
        return self._rows().unflatten(0, (n_heads, self.width // n_heads))

    def _rows(self) -> Tensor:
        if self.plain:
            weight: Tensor = self.module.weight.detach()  # type: ignore[union-attr, assignment, operator]
            return weight if isinstance(self.module, Conv1D) else weight.t()  # Conv1D stores [in, out]
        offset = self._probe(self._zeros(1))
        unit = self._zeros(self.width)
        unit.fill_diagonal_(1)
        rows = self._probe(unit) - offset
        some = torch.randn(4, self.width, generator=torch.Generator().manual_seed(0)).to(rows)
        error = (some @ rows + offset - self._probe(some)).norm() / (some @ rows).norm()
        if not error <= 64 * torch.finfo(rows.dtype).eps:
            raise UnsupportedAttention(
                f"the output projection {self.name} ({type(self.module).__name__}) is not an affine map (relative error {error:.1e} on a "
                "random input; it may quantise its input), so it has no blocks W_h: load the model unquantised"
            )
        return rows

    def _zeros(self, count: int) -> Tensor:
        floating = next((weight for weight in self.module.parameters() if weight.is_floating_point()), torch.zeros(()))
        device = "cpu" if floating.is_meta else floating.device
        return torch.zeros(count, self.width, dtype=floating.dtype, device=device)

    @torch.no_grad()
    def _probe(self, inputs: Tensor) -> Tensor:
        try:
            result: Tensor = self.module(inputs[None])
            return result.detach()[0]
        except Exception as error:
            raise UnsupportedAttention(
                f"the output projection {self.name} ({type(self.module).__name__}) takes more than the attention output "
                f"({type(error).__name__}), so it has no blocks W_h of its own"
            ) from error


def find_output_projection(model: nn.Module, name: str, width: int) -> OutputProjection:
    """W_O of the attention module called `name`: the child that takes its output, or (in BERT's families) a sibling.

    Args:
        model: the model that the name is counted from.
        name: the attention module's qualified name.
        width: heads · value_dim, what W_O must take.

    Raises:
        UnsupportedAttention: there is none under any of the names that families use.
    """
    attention = model.get_submodule(name)
    parent = model.get_submodule(name.rpartition(".")[0])
    for place, prefix in ((attention, ""), (parent, "../")):
        for child in NAMES if place is attention else ("output.dense",):
            try:
                module = attrgetter(child)(place)
            except AttributeError:
                continue
            if isinstance(module, nn.Module):
                return OutputProjection(prefix + child, module, width)
    raise UnsupportedAttention(
        f"{type(attention).__name__} has no output projection under any of the names {', '.join(NAMES)}, so what a head "
        "contributes to the residual stream is unknown; take a family that has one, such as Llama, Qwen3 or GPT-2"
    )
