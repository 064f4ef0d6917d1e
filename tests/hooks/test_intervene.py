"""Hiding entries is eviction without freeing memory, and leaves nothing behind."""

import pytest
import torch
from models import prompt, tiny

from hooks import UnsupportedAttention, capture, hiding
from hooks.dispatch import is_intercepted


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hidden_entries_get_no_weight_and_the_rest_is_renormalised(attention):
    model = tiny("llama", attention, dtype=torch.float64)
    masks = [torch.rand(1, 2, 10, generator=torch.Generator().manual_seed(layer)) < 0.5 for layer in range(3)]
    for mask in masks:
        mask[..., 0] = True
    with hiding(model, masks), capture(model, window=8) as captured:
        model(prompt(18))
    for record, mask in zip(captured, masks, strict=True):
        # the capture, entered second, sees the call as hiding changed it
        seen = torch.cat([mask, mask.new_ones(1, 2, 8)], -1).repeat_interleave(2, 1)[:, :, None]
        hidden = record.mask if record.mask.dtype == torch.bool else record.mask > torch.finfo(torch.float64).min
        assert not (hidden & ~seen).any()
        logits = torch.einsum("bhtd,bhnd->bhtn", record.queries, record.keys.repeat_interleave(2, 1)) * record.scale
        causal = torch.ones(18, 18, dtype=torch.bool).tril()[-8:]
        weights = logits.masked_fill(~(seen & causal), -torch.inf).softmax(-1)
        expected = (weights @ record.values.repeat_interleave(2, 1)).transpose(1, 2)
        allowed = 1e-12 if attention == "sdpa" else 1e-6  # eager attention casts its softmax to float32
        torch.testing.assert_close(record.attention_output, expected, rtol=allowed, atol=allowed)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hiding_nothing_changes_nothing(attention):
    model = tiny("llama", attention)
    with hiding(model, [torch.ones(1, 2, 10, dtype=torch.bool)] * 3):
        hidden = model(prompt(18)).logits
    torch.testing.assert_close(hidden, model(prompt(18)).logits)


@torch.no_grad()
def test_masks_that_do_not_fit_are_refused_with_shapes_and_nothing_is_left():
    model = tiny("llama")
    four_heads, one_layer = [torch.ones(1, 4, 10, dtype=torch.bool)] * 3, [torch.ones(1, 2, 10, dtype=torch.bool)]
    message = r"keep-mask \(1, 4, 10\) does not fit keys \[batch 1, KV heads 2"
    with pytest.raises(ValueError, match=message), hiding(model, four_heads):
        model(prompt(18))
    message = r"layer 1 calls attention, but there is no keep-mask for it \(1 masks"
    with pytest.raises(ValueError, match=message), hiding(model, one_layer):
        model(prompt(18))
    assert not is_intercepted(model)


@torch.no_grad()
def test_hiding_under_flex_attention_is_refused_not_run():
    model = tiny("llama", "flex_attention", head_dim=32, hidden_size=128)
    masks = [torch.ones(1, 2, 10, dtype=torch.bool)] * 3
    with pytest.raises(UnsupportedAttention, match="'flex_attention'"), hiding(model, masks):
        model(prompt(18))
