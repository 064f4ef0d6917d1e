"""What a removal does to the next tokens, against passes that are run whole, one candidate at a time."""

import pytest
import torch
from models import prompt, tiny
from transformers.cache_utils import DynamicCache

from hooks import UnsupportedAttention, hiding
from hooks.dispatch import is_intercepted
from hooks.forward import forward
from hooks.intervene import replaying
from hooks.tiny import tiny_model
from perturbation.removal import Removals

FAMILIES = ["llama", "qwen3", "gpt2", "phi", "olmo2"]


def whole(model, before, after, layer, head, entry):
    """One entry removed, the model run from its first layer, in float64, by loops."""
    cache = DynamicCache(config=model.config)
    forward(model, before, cache)
    full = forward(model, after, cache)[0].softmax(-1)
    cache.crop(-after.shape[1])
    heads = cache.layers[0].keys.shape[1]
    keep = [torch.ones(1, heads, before.shape[1], dtype=torch.bool) for _ in cache.layers]
    keep[layer][0, head, entry] = False
    with hiding(model, keep):
        evicted = forward(model, after, cache)[0].softmax(-1)
    kl = torch.stack([sum(p * (p / q).log() for p, q in zip(*pair, strict=True)) for pair in zip(full, evicted, strict=True)])
    tokens = after[0, 1:]
    change = torch.stack([(evicted[t, y] / full[t, y]).log() for t, y in enumerate(tokens)]) if len(tokens) else torch.zeros(0)
    return kl, (full - evicted).abs().sum(-1) / 2, change.double()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("queries", [1, 3])
def test_leave_one_out_is_the_kl_of_a_whole_pass_without_the_entry(family, queries):
    model = tiny(family, dtype=torch.float64)
    before, after = prompt(9), prompt(queries, seed=1)
    removals = Removals.of(model, before, after)
    for layer in range(3):
        seen = 0
        for places, found in removals.one_by_one(layer, batch=7):
            for row, (head, entry) in enumerate(places.tolist()):
                if (seen + row) % 4 == layer:
                    kl, distance, change = whole(model, before, after, layer, head, entry)
                    torch.testing.assert_close(found.kl[row], kl, rtol=1e-4, atol=1e-12)
                    torch.testing.assert_close(found.total_variation[row], distance, rtol=1e-6, atol=1e-12)
                    torch.testing.assert_close(found.log_likelihood[row], change, rtol=1e-6, atol=1e-10)
            seen += len(places)
        assert seen == 9 * removals._past[layer][0].shape[1]
    assert not is_intercepted(model)
    assert all("forward" not in module.__dict__ for module in model.modules())


@torch.no_grad()
def test_a_run_goes_on_from_where_it_was():
    removals = Removals.of(tiny("llama", dtype=torch.float64), prompt(9), prompt(1, seed=1))
    every = torch.cat([found.kl for _, found in removals.one_by_one(1, batch=5)])
    rest = torch.cat([found.kl for _, found in removals.one_by_one(1, batch=5, start=11)])
    torch.testing.assert_close(rest, every[11:])
    assert (every > 0).all()


@torch.no_grad()
def test_sets_over_several_layers_are_removed_together():
    model = tiny("llama", dtype=torch.float64)
    before, after = prompt(12), prompt(4, seed=1)
    keep = [torch.rand(3, 2, 12, generator=torch.Generator().manual_seed(seed)) < 0.6 for seed in range(3)]
    for mask in keep:
        mask[..., -1] = True
    found = Removals.of(model, before, after).without({1: keep[1], 2: keep[2]})
    for row in range(3):
        cache = DynamicCache(config=model.config)
        forward(model, before, cache)
        full = forward(model, after, cache)
        cache.crop(-4)
        with hiding(model, [torch.ones(1, 2, 12, dtype=torch.bool), keep[1][row : row + 1], keep[2][row : row + 1]]):
            evicted = forward(model, after, cache)
        kl = (full.softmax(-1) * (full.log_softmax(-1) - evicted.log_softmax(-1))).sum(-1)
        torch.testing.assert_close(found.kl[row], kl[0], rtol=1e-8, atol=1e-12)
        assert torch.equal(found.agreement[row], (full.argmax(-1) == evicted.argmax(-1))[0])


@torch.no_grad()
def test_keeping_all_changes_nothing():
    found = Removals.of(tiny("llama", dtype=torch.float64), prompt(9), prompt(2, seed=1)).without(
        {0: torch.ones(1, 2, 9, dtype=torch.bool)}
    )
    assert found.kl.abs().max() < 1e-14
    assert found.reverse_kl.abs().max() < 1e-14
    assert found.agreement.all()


@torch.no_grad()
def test_what_cannot_be_judged_is_refused():
    with pytest.raises(UnsupportedAttention, match="does not cache the whole prompt"):
        Removals.of(tiny_model("gemma3_text"), prompt(20), prompt(1))
    model = tiny("llama")
    with pytest.raises(ValueError, match="tokens are needed"):
        Removals.of(model, prompt(0), prompt(1))
    removals = Removals.of(model, prompt(9), prompt(1))
    with pytest.raises(ValueError, match="do not fit"):
        removals.without({0: torch.ones(1, 2, 8, dtype=torch.bool)})
    with pytest.raises(ValueError, match="do not fit"):
        removals.without({})
    with pytest.raises(ValueError, match=r"layers \[7\] do not exist"), replaying(model, {7: None}):
        pass
