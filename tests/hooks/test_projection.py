"""W_O as blocks per head, whatever module holds it."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hooks import UnsupportedAttention
from hooks.projection import OutputProjection, find_output_projection


@pytest.mark.parametrize("module", [nn.Linear(12, 5), nn.Linear(12, 5, bias=False), Conv1D(5, 12)])
def test_blocks_times_heads_are_what_the_module_computes(module):
    projection, heads = OutputProjection("o_proj", module), torch.randn(2, 3, 4)
    written = (heads.transpose(0, 1) @ projection.blocks(3)).sum(0)
    if projection.bias is not None:
        written = written + projection.bias
    torch.testing.assert_close(written, module(heads.flatten(1)))


def test_blocks_are_views_of_the_weight():
    module = nn.Linear(12, 5)
    assert (
        OutputProjection("o_proj", module).blocks(3).untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr()
    )


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="takes 12 inputs, which 5 heads do not divide evenly"):
        OutputProjection("o_proj", nn.Linear(12, 4)).blocks(5)


def test_a_module_without_w_o_is_refused_by_name():
    with pytest.raises(UnsupportedAttention, match="Identity has no output projection"):
        find_output_projection(nn.Identity())
