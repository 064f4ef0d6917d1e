"""One look at a prompt: every policy decides there what it does after a prefill of its own."""

import pytest
import torch
from kinds import KINDS, LINEAR, model, named, owners
from models import prompt, tiny

import eviction.looked
from eviction import policy, prefill
from eviction.looked import look
from hooks import UnsupportedAttention
from hooks.dispatch import is_intercepted

NAMES = ("snapkv", "adakv+two-stage", "h2o", "headkv", "random", "fisher", "tova+defensive")


@torch.no_grad()
@pytest.mark.parametrize("kind", list(KINDS))
def test_policies_keep_what_they_keep_after_a_prefill(kind):
    used, tokens, padded = model(kind), prompt(40, batch=2), KINDS[kind][1] == "sdpa"
    mask = torch.ones_like(tokens) if padded else None  # in float64 the model's own eager attention gives NaN to pads
    if mask is not None:
        mask[1, :5] = 0
    looked = look(used, tokens, window=None, attention_mask=mask)
    for name in NAMES:
        chosen = named(name, owners(kind)) if name == "headkv" else named(name)
        if name == "fisher" and kind in LINEAR:
            with pytest.raises(UnsupportedAttention, match="linear state"):
                looked.decide(chosen, 0.4)
            continue
        expected = prefill(used, tokens, chosen, 0.4, attention_mask=mask)
        found = looked.decide(chosen, 0.4)
        assert len(found) == len(expected.keep)
        for one, other in zip(found, expected.keep, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
        torch.testing.assert_close(looked.logits, expected.logits[:, -1])
    assert not is_intercepted(used)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in used.modules())


@torch.no_grad()
def test_the_model_runs_again_once_for_all_budgets(monkeypatch):
    ran, original = [], eviction.looked.removal_nats
    monkeypatch.setattr(
        eviction.looked, "removal_nats", lambda *args, **kwargs: (ran.append(args[3]), original(*args, **kwargs))[1]
    )
    looked = look(tiny("llama"), prompt(40), window=8)
    for budget in (0.3, 0.5, 20):
        looked.decide(policy("fisher", window=4), budget)
        looked.decide(policy("fisher-uniform", window=4), budget)
    assert len(ran) == 1
    looked.decide(policy("fisher", window=4, seed=1), 0.3)
    looked.decide(policy("straight-through", window=4), 0.3)
    assert [(one.seed, one.path) for one in ran] == [(0, "model"), (1, "model"), (0, "residual")]


@torch.no_grad()
def test_what_was_not_captured_cannot_be_looked_at():
    looked = look(tiny("llama"), prompt(40), window=8)
    with pytest.raises(ValueError, match="snapkv looks at 32 queries, and 8 were captured"):
        looked.decide(policy("snapkv"), 0.5)
    with pytest.raises(ValueError, match="h2o looks at 40 queries"):
        looked.decide(policy("h2o"), 0.5)
    assert look(tiny("llama"), prompt(6)).decide(policy("snapkv"), 0.5)  # fewer tokens than the window
    with pytest.raises(ValueError, match="at least one token"):
        look(tiny("llama"), prompt(0))
