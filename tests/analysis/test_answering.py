"""Answers on compressed caches are those of the full cache with the same entries hidden, and the numbers beside them are exact."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from kinds import KINDS, LINEAR, SETTINGS, named
from tokens import tokenizer
from transformers.cache_utils import DynamicCache

from analysis.experiments.answering import FULL, Answering, stops
from analysis.experiments.judging import FIELDS, UNTOUCHED
from analysis.experiments.prompts import prompt
from analysis.tasks import Sample
from bounds.audit import audit
from eviction import BudgetError, policy
from hooks import capture
from hooks.dispatch import is_intercepted
from hooks.forward import forward
from hooks.intervene import hiding
from hooks.reference import LoadedModel
from hooks.tiny import tiny_model
from perturbation.divergence import kl_divergence
from perturbation.weights import attention_weights

SAMPLE = Sample(
    "part", 0, "The secret number of the old green house is 4711, they say. " * 2, "What is it?", " It is", ("4711",), 6
)
CELLS = [("snapkv", 0.3), ("adakv+two-stage", 0.4), ("random", 6)]
POLICIES = {name: named(name) for name, _ in CELLS}


@cache
def loaded(kind: str) -> LoadedModel:
    family, attention = KINDS[kind]
    more = {"vocab_size_per_layer_input": 500} if family.startswith(("gemma3n", "gemma4")) else {}
    made = tiny_model(family, attention=attention, dtype=torch.float64, vocab_size=500, **more, **SETTINGS.get(kind, {}))
    return LoadedModel(made, tokenizer(), kind, "")


def asked(aware: bool = False, sample: Sample = SAMPLE, forced: bool = False, raw: bool = False):
    return prompt(tokenizer(), sample, "all", aware=aware, raw=raw, forced=forced)


def hidden(used: LoadedModel, one, keep):
    """The greedy answer with entries hidden from a full cache, a token at a time, and the logits before each token."""
    cache_ = DynamicCache(config=used.model.config)
    forward(used.model, one.context, cache_, last_logits=1)
    given, said, logits = one.opening, [], []
    with hiding(used.model, keep):
        while len(said) < one.sample.max_new_tokens and not (said and said[-1] in stops(used)):
            logits.append(forward(used.model, given, cache_, last_logits=1)[0, -1])
            said.append(int(logits[-1].argmax()))
            given = torch.tensor([[said[-1]]])
    return said, torch.stack(logits)


def taught(used: LoadedModel, one, keep, tokens):
    """The logits before each of `tokens`, which are given, with entries hidden from a full cache."""
    cache_ = DynamicCache(config=used.model.config)
    forward(used.model, one.context, cache_, last_logits=1)
    with hiding(used.model, keep):
        return forward(used.model, torch.cat([one.opening, torch.tensor([tokens[:-1]])], 1), cache_, last_logits=len(tokens))[0]


# in "a window in the cache alone" a pass of several tokens sees what the same tokens do not see one by one, in the stock model too
@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a window in the cache alone"])
def test_answers_are_those_of_the_full_cache_with_entries_hidden(kind):
    used, one = loaded(kind), asked()
    answering = Answering(used, one.context, POLICIES, CELLS)
    everything = [None if mask is None else torch.ones_like(mask) for mask in answering.masks[CELLS[0]]]
    full, _ = hidden(used, one, everything)
    assert answering.full(one).tokens == full
    before = taught(used, one, everything, full)
    changed = 0
    for cell in CELLS:
        row = answering.row(one, cell)
        said, _ = hidden(used, one, answering.masks[cell])
        assert row["prediction"] == used.tokenizer.decode(said, skip_special_tokens=True)
        changed += said != full
        after = taught(used, one, answering.masks[cell], full)
        assert row["kl"] == pytest.approx(float(kl_divergence(before, after).mean()), rel=1e-4, abs=1e-9)
        assert row["agreement"] == float((before.argmax(-1) == after.argmax(-1)).double().mean())
        likelihood = after.log_softmax(-1)[torch.arange(len(full)), torch.tensor(full)].mean()
        assert row["log_likelihood"] == pytest.approx(float(likelihood), rel=1e-5)
        assert row["bytes"] < row["full_bytes"] or kind in LINEAR
    # of every kind but one some answer differs, so that decoding on from a difference is shown
    assert changed or kind == "one attention module for several layers"
    row = answering.row(one, FULL)
    assert (row["kl"], row["agreement"], row["flipped"]) == (0.0, 1.0, 0)
    assert {name: row[name] for name in FIELDS} == UNTOUCHED
    assert row["bytes"] == row["full_bytes"]
    assert not is_intercepted(used.model)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["full", "sliding and full", "sinks, sliding", "latent", "gated, beside linear attention"])
def test_perturbation_bound_and_mass_are_the_audits(kind):
    used, one = loaded(kind), asked()
    answering = Answering(used, one.context, POLICIES, CELLS, judge=3)
    tokens = answering.full(one).tokens
    cache_ = DynamicCache(config=used.model.config)
    forward(used.model, one.context, cache_, last_logits=1)
    with capture(used.model, window=None) as captured:
        forward(used.model, torch.cat([one.opening, torch.tensor([tokens[:-1]])], 1), cache_)
    first = one.opening.shape[1] - 1
    seen = one.length + len(tokens) - 1
    for cell in CELLS:
        found = []
        for record in captured:
            mask = answering.masks[cell][record.layer]
            keep = torch.ones(1, record.n_kv_heads, seen, dtype=torch.bool)
            keep[:, :, : mask.shape[2]] = mask
            keep = keep[:, :, -record.n_keys :]
            weights, sinks = attention_weights(**record.inputs)
            held = audit(weights, record.values, record.projection_blocks, keep, sinks, gate=record.gate)
            assert held.violations == 0
            some = slice(first, first + 3)
            parts = (held.perturbation, held.theta, held.retained_mass, held.condition.double())
            found.append([float(part[0, :, some].mean()) for part in parts])
        row = answering.row(one, cell)
        for name, value in zip(FIELDS, torch.tensor(found).mean(0).tolist(), strict=False):
            assert row[name] == pytest.approx(value, rel=1e-5), name
        assert 0 < row["perturbation"] <= row["theta"]
        assert row["relative_perturbation"] > 0


@torch.no_grad()
def test_a_row_does_not_depend_on_the_other_cells():
    used, one = loaded("full"), asked()
    together = Answering(used, one.context, POLICIES, CELLS)
    rows = [together.row(one, cell) for cell in CELLS]
    for cell, row in zip(CELLS, rows, strict=True):
        assert Answering(used, one.context, POLICIES, [cell]).row(one, cell) == row


@torch.no_grad()
def test_what_cannot_choose_fails_alone():
    used, one = loaded("gated, beside linear attention"), asked()
    policies = {**POLICIES, "fisher": policy("fisher", window=4)}
    answering = Answering(used, one.context, policies, [("fisher", 0.3), ("snapkv", 10_000), ("random", 0.3)])
    with pytest.raises(Exception, match="linear state"):
        answering.row(one, ("fisher", 0.3))
    assert answering.row(one, ("random", 0.3))["kl"] > 0
    with pytest.raises(BudgetError):
        Answering(used, one.context, POLICIES, [("snapkv", 1.5)]).row(one, ("snapkv", 1.5))


@torch.no_grad()
def test_a_reference_answer_that_is_given_is_judged_token_by_token():
    used = loaded("full")
    one = asked(sample=replace(SAMPLE, answer=(" is a secret number of the house",), max_new_tokens=5), forced=True, raw=True)
    assert one.truth.shape[1] == 5
    answering = Answering(used, one.context, POLICIES, CELLS, judge=0)
    for cell in (FULL, *CELLS):
        row = answering.row(one, cell)
        keep = answering.masks.get(cell) or [torch.ones_like(mask) for mask in answering.masks[CELLS[0]]]
        logits = taught(used, one, keep, one.truth[0].tolist())
        assert row["score"] == float((logits.argmax(-1) == one.truth[0]).double().mean())
        assert row["judged_tokens"] == 5
        assert all(row[name] != row[name] for name in FIELDS)


def test_seen_and_unseen_questions_have_the_same_tokens():
    unseen, seen = asked(), asked(aware=True)
    assert torch.equal(torch.cat([unseen.context, unseen.opening], 1), torch.cat([seen.context, seen.opening], 1))
    assert seen.opening.shape[1] == 1
    text = tokenizer().decode(torch.cat([unseen.context, unseen.opening], 1)[0])
    assert text == f"<|user|>{SAMPLE.context}{SAMPLE.question}<|end|><|assistant|>{SAMPLE.answer_prefix}"
    assert tokenizer().decode(unseen.context[0]) == f"<|user|>{SAMPLE.context}"
    plain = asked(raw=True)
    assert tokenizer().decode(plain.context[0]) == SAMPLE.context
    assert tokenizer().decode(plain.opening[0]) == f"{SAMPLE.question}{SAMPLE.answer_prefix}"
