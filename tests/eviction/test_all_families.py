"""Every family that transformers has: decoding on a compressed cache equals its masked full cache, or it is refused by name."""

from functools import partial

import pytest
import torch
from kinds import LATEST
from models import prompt
from transformers.cache_utils import DynamicCache

from eviction import policy, prefill, reading
from hooks import UnsupportedAttention, hiding
from hooks.forward import forward
from hooks.tiny import families, tiny_model

POLICIES = [policy(name, window=4, kernel=3) for name in (("adakv", "snapkv") if LATEST else ("adakv",))]
"""Ragged and uniform layers; ragged ones alone on the lowest transformers."""


def built(family: str):
    for attention in ("sdpa", "eager"):
        make = partial(tiny_model, family, attention=attention, dtype=torch.float64)
        try:
            model = make()
            with torch.no_grad():
                forward(model, prompt(20), DynamicCache(config=model.config))
        except Exception as error:  # what transformers cannot build or run at this size is no matter of eviction
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            return make, attention
    pytest.skip(f"not built: {reason[:90]}")


@torch.no_grad()
@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("chosen", POLICIES, ids=lambda chosen: chosen.name)
def test_decoding_equals_the_masked_full_cache_or_the_family_is_refused_by_name(family, chosen):
    make, attention = built(family)
    model, other = make(), make()  # two: recurrent_gemma keeps its state on the model
    try:
        prefilled = prefill(model, prompt(40), chosen, 0.4)
        full = DynamicCache(config=other.config)
        forward(other, prompt(40), full)
        for step in (prompt(1, seed=1), prompt(3, seed=2), prompt(9, seed=3), prompt(1, seed=4)):
            with reading(model):
                evicted = forward(model, step, prefilled.cache)
            with hiding(other, prefilled.keep):
                masked = forward(other, step, full)
            allowed = 1e-10 if attention == "sdpa" else 1e-5
            torch.testing.assert_close(evicted, masked, rtol=allowed, atol=allowed)
    except UnsupportedAttention as error:
        pytest.skip(f"refused: {str(error)[:90]}")
