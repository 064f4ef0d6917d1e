"""Drift of the hidden state, by the real forward pass, against masks built by hand."""

import pytest
import torch
from models import prompt, tiny

from hooks import UnsupportedAttention
from hooks.dispatch import is_intercepted
from perturbation.drift import drift

LENGTH, LATER = 12, 5


def masks(seed=0):
    generator = torch.Generator().manual_seed(seed)
    keep = [torch.rand(1, 2, LENGTH, generator=generator) < 0.5 for _ in range(3)]
    for mask in keep:
        mask[..., 0] = True
    return keep


def tokens():
    both = prompt(LENGTH + LATER)
    return both[:, :LENGTH], both[:, LENGTH:]


@torch.no_grad()
def by_hand(model, evicted, keep):
    """Hidden states of the later tokens in one pass without a cache: an additive mask per layer and head, given layer by layer."""
    ids = torch.cat(tokens(), 1)
    length = ids.shape[1]
    causal = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)
    hidden, states = model.model.embed_tokens(ids), []
    rotary = model.model.rotary_emb(hidden, torch.arange(length)[None])
    for index, layer in enumerate(model.model.layers):
        bias = causal.expand(1, 4, length, length).clone()
        if index in evicted:
            hidden_keys = ~torch.cat([keep[index], torch.ones(1, 2, LATER, dtype=torch.bool)], -1).repeat_interleave(2, 1)
            bias[:, :, LENGTH:] = bias[:, :, LENGTH:].masked_fill(hidden_keys[:, :, None], -torch.inf)
        hidden = layer(hidden, attention_mask=bias, position_embeddings=rotary)
        states.append(hidden[:, LENGTH:])
    return states


@torch.no_grad()
@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_drift_of_one_layer_the_first_k_and_all_equals_masks_by_hand(attention, norm):
    model = tiny("llama", attention, dtype=torch.float64)
    keep = masks()
    sets = [{1}, range(2), range(3)]
    found = drift(model, *tokens(), keep, evicted=sets, norm=norm)
    full = by_hand(model, (), keep)
    allowed = 1e-10 if attention == "sdpa" else 1e-5  # eager attention casts its softmax to float32
    for one, evicted in zip(found, sets, strict=True):
        assert one.layers == (0, 1, 2)
        for layer, (before, after) in enumerate(zip(full, by_hand(model, evicted, keep), strict=True)):
            expected = (before - after).norm(p=norm, dim=-1)
            torch.testing.assert_close(one.absolute[layer], expected, rtol=allowed, atol=allowed)
            size = before.norm(p=norm, dim=-1)
            torch.testing.assert_close(one.relative[layer], expected / size, rtol=allowed, atol=allowed)
    assert (found[0].absolute[0] == 0).all()  # below the evicted layer nothing has happened yet
    assert (found[0].absolute[1:] > 0).all()


def test_keeping_everything_drifts_nowhere_and_nothing_is_left_on_the_model():
    model = tiny("llama", "sdpa")
    (found,) = drift(model, *tokens(), [torch.ones(1, 2, LENGTH, dtype=torch.bool)] * 3)
    assert (found.relative == 0).all()
    assert not is_intercepted(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_one_set_of_layers_and_all_layers_are_one_drift_each():
    model = tiny("llama", "sdpa")
    (whole,) = drift(model, *tokens(), masks())
    (listed,) = drift(model, *tokens(), masks(), evicted=[[0, 1, 2]])
    torch.testing.assert_close(whole.absolute, listed.absolute, rtol=0, atol=0)


def test_what_cannot_be_evicted_from_is_refused_and_leaves_nothing():
    model = tiny("llama", "sdpa")
    with pytest.raises(ValueError, match=r"layers \[3\] have no keep-mask"):
        drift(model, *tokens(), masks(), evicted=[{3}])
    with pytest.raises(ValueError, match="does not fit keys"):
        drift(model, *tokens(), [torch.ones(1, 3, LENGTH, dtype=torch.bool)] * 3)
    sliding = tiny("mistral", "sdpa", sliding_window=6)
    with pytest.raises(UnsupportedAttention, match="of the prompt's 12 entries"):
        drift(sliding, *tokens(), masks())
    for left in (model, sliding):
        assert not is_intercepted(left)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in left.modules())
