"""W_O as blocks per head, whatever module holds it."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hooks import UnsupportedAttention
from hooks.projection import OutputProjection, find_output_projection


class LoRA(nn.Module):
    """A Linear with a low-rank adapter beside it, as adapter libraries wrap it."""

    def __init__(self):
        super().__init__()
        self.base_layer, self.down, self.up = nn.Linear(12, 5), nn.Linear(12, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, inputs):
        return self.base_layer(inputs) + 2 * self.up(self.down(inputs))


class EightBit(nn.Linear):
    """A Linear whose weight is stored in 8 bits and scaled when used."""

    def __init__(self):
        super().__init__(12, 5)
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        self.scale, self.bits = scale, (self.weight.detach() / scale).round().to(torch.int8)
        del self.weight
        self.weight = nn.Parameter(self.bits, requires_grad=False)

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.bits * self.scale, self.bias)


class RoundedInput(nn.Linear):
    """Not affine: it quantises what it is given."""

    def forward(self, inputs):
        return super().forward((inputs * 4).round() / 4)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(12, 5), nn.Linear(12, 5, bias=False), Conv1D(5, 12), LoRA(), EightBit()],
    ids=lambda m: type(m).__name__,
)
def test_blocks_times_heads_are_what_the_module_computes(module):
    projection, heads = OutputProjection("o_proj", module, 12), torch.randn(2, 3, 4)
    written = (heads.transpose(0, 1) @ projection.blocks(3)).sum(0)
    if projection.bias is not None:
        written = written + projection.bias
    torch.testing.assert_close(written, module(heads.flatten(1)))


def test_blocks_are_views_of_a_plain_weight():
    module = nn.Linear(12, 5)
    blocks = OutputProjection("o_proj", module, 12).blocks(3)
    assert blocks.untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr()


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="takes 12 inputs, which 5 heads do not divide evenly"):
        OutputProjection("o_proj", nn.Linear(12, 4), 12).blocks(5)


def test_a_module_that_is_not_affine_is_refused():
    with pytest.raises(UnsupportedAttention, match=r"RoundedInput. is not an affine map"):
        OutputProjection("o_proj", RoundedInput(12, 4), 12).blocks(3)


def test_a_module_that_takes_more_than_the_attention_output_is_refused():
    with pytest.raises(UnsupportedAttention, match="takes more than the attention output"):
        OutputProjection("o_proj", nn.Bilinear(12, 12, 4), 12).blocks(3)


def test_a_module_without_w_o_is_refused_by_name():
    model = nn.Sequential(nn.Sequential(nn.Identity()))
    with pytest.raises(UnsupportedAttention, match="Identity has no output projection"):
        find_output_projection(model, "0.0", 12)
