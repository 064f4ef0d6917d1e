"""Every policy by name, with its own parameters, on any context, and a user's own beside ours."""

import dataclasses

import pytest
import torch
from records import record

from eviction import Observation, describe, names, policy, register, unregister
from eviction.live import Sketch
from eviction.policy import Policy

HEADS = {"scores": tuple((1.0, 2.0) for _ in range(3))}


def made(name, **settings):
    return policy(name, **(HEADS if name.startswith("headkv") else {}), **settings)


def looked_at(made_up) -> Observation:
    """The record with removals' KL as a model's might be, for policies that ask for it; the same in all rows."""
    batch, heads, keys = made_up.keys.shape[:3]
    along = torch.randn(1, heads, keys, 4, generator=torch.Generator().manual_seed(made_up.layer)).expand(batch, -1, -1, -1)
    seen = Observation(made_up, nats=along.square().sum(-1))
    sketch = Sketch(torch.arange(keys).expand(batch, heads, -1))
    sketch.along, sketch.rest = along * seen.valid[..., None], torch.zeros(batch, heads, 4)
    return dataclasses.replace(seen, sketch=sketch)


def decided(chosen: Policy, length: int, budget, pads=(0, 0)):
    layers = [
        chosen.score(looked_at(record(batch=2, keys=length, queries=length, pads=pads, layer=layer, seed=layer)), budget)
        for layer in range(3)
    ]
    return layers, chosen.decide_all(layers)


@pytest.mark.parametrize("name", names())
def test_contexts_of_any_length_under_any_policy_never_give_an_empty_cache(name):
    chosen = made(name)
    for length in (1, 2, 3, 5, 9, 17, 33, 40):
        for budget in (0.05, 0.3, 1, 20):
            pads = (0, length // 3)
            layers, decisions = decided(chosen, length, budget, pads)
            for layer, decision in zip(layers, decisions, strict=True):
                assert (decision.keep.sum(-1) >= 1).all()
                place = torch.arange(length)
                assert not (decision.keep & (place < torch.tensor(pads)[:, None])[:, None]).any()
                if decision.stage1 is not None:
                    assert not (decision.stage1 & ~decision.keep).any()
                assert (layer.base <= torch.tensor([length, length - pads[1]])).all()
            total = sum(int(decision.keep.sum()) for decision in decisions)
            budgeted = sum(int(layer.base.sum()) for layer in layers) * 2
            assert total == budgeted or (total > budgeted and min(budget * length, budget) <= 3)


@pytest.mark.parametrize("name", names())
def test_a_budget_of_everything_keeps_everything(name):
    for budget in (1.0, 24, 1000):
        _, decisions = decided(made(name), 24, budget)
        assert all(bool(decision.keep.all()) for decision in decisions)


@pytest.mark.parametrize("name", names())
def test_the_same_record_gives_the_same_choice_and_each_row_by_itself(name):
    chosen = made(name)
    together, alone = [], []
    for layer in range(3):
        both = record(batch=2, keys=30, queries=30, pads=(0, 7), layer=layer, seed=layer)
        together.append(chosen.score(looked_at(both), 0.4))
        if name.startswith("random"):
            continue
        rows = {
            item.name: getattr(both, item.name)[1:]
            for item in dataclasses.fields(both)
            if isinstance(getattr(both, item.name), torch.Tensor)
        }
        alone.append(chosen.score(looked_at(dataclasses.replace(both, **rows)), 0.4))
    again = chosen.decide_all(together)
    for one, other in zip(chosen.decide_all(together), again, strict=True):
        assert torch.equal(one.keep, other.keep)
    if alone:
        for whole, part in zip(again, chosen.decide_all(alone), strict=True):
            assert torch.equal(whole.keep[1:], part.keep)


@pytest.mark.parametrize("name", names())
def test_every_policy_is_described_with_formula_source_and_parameters(name):
    described = describe(name)
    assert [verb for verb, *_ in described.verbs] == ["accumulate", "allocate", "select"]
    for _, cls, text, source, parameters in described.verbs:
        assert len(text) > 40
        assert source
        assert cls
        assert all(value for _, value in parameters)
    assert "quer" in described.queries


def test_settings_go_to_the_verbs_that_have_them_and_unknown_ones_are_refused():
    chosen = policy("adakv+two-stage", window=16, floor=0.3, alpha=0.7, norm=2)
    assert (chosen.accumulate.window, chosen.allocate.floor, chosen.select.alpha, chosen.select.norm) == (16, 0.3, 0.7, 2)
    assert policy("defensivekv").accumulate.over == "max"
    assert policy("layer-defensivekv").allocate.scope == "model"
    with pytest.raises(ValueError, match="snapkv has no parameter alpha; it has group, kernel, over, pooling, window"):
        policy("snapkv", alpha=0.5)
    with pytest.raises(ValueError, match="did you mean snapkv"):
        policy("snapvk")
    with pytest.raises(ValueError, match=r"did you mean .*adakv\+two-stage"):
        policy("adakv+twostage")
    with pytest.raises(ValueError, match="headkv needs scores: Budgets in proportion to head scores"):
        policy("headkv")
    with pytest.raises(ValueError, match="use decide_all"):
        policy("pyramidkv").decide(record(), 0.5)


def test_a_policy_of_ones_own_is_a_function_and_a_name():
    @register("large-values", queries=1, ends=(1, 2))
    def large_values(seen: Observation):
        """‖v‖₂: entries with large values first, whatever looked at them before."""
        return seen.record.values.norm(dim=-1)

    try:
        chosen = policy("large-values")
        made_record = record(keys=20)
        keep = chosen.decide(made_record, 8).keep
        norms = made_record.values.norm(dim=-1)[..., 1:18]
        expected = torch.zeros_like(keep).scatter(-1, norms.topk(5).indices + 1, True)
        expected[..., 0] = expected[..., 18:] = True
        assert torch.equal(keep, expected)
        assert "large-values+two-stage" in names()
        assert policy("large-values+two-stage").decide(made_record, 8).stage1 is not None
        assert describe("large-values").verbs[0][2].startswith("‖v‖₂: entries with large values")
        with pytest.raises(ValueError, match="taken"):
            register("large-values")(large_values)
    finally:
        unregister("large-values")
    assert "large-values" not in names()
    with pytest.raises(ValueError, match="cannot be registered"):
        register("snapkv")
    with pytest.raises(ValueError, match="joins a base and a selection"):
        register("mine+two")


def test_a_function_of_the_wrong_shape_or_with_nan_is_refused_with_what_is_needed():
    for name, scores in (("short", torch.ones(1, 2, 3)), ("nan", torch.full((1, 2, 24), torch.nan))):
        register(name)(lambda seen, scores=scores: scores)
        try:
            with pytest.raises(ValueError, match=r"needed are finite numbers \[batch, heads, keys\] \(1, 4, 24\)"):
                policy(name).decide(record(), 0.5)
        finally:
            unregister(name)


@pytest.mark.parametrize("settings", [{"window": 2.5}, {"window": "32"}, {"kernel": True}, {"kernel": 0}])
def test_counts_that_are_no_whole_numbers_are_refused_when_the_policy_is_made(settings):
    with pytest.raises((ValueError, TypeError), match=next(iter(settings))):
        policy("snapkv", **settings)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("snapkv", "SnapKV"),
        ("adakv", "AdaKV"),
        ("adakv+two-stage", "CriticalKV"),
        ("h2o", "H2O"),
        ("fisher", "ours"),
        ("fisher-adakv", "ours"),
        ("straight-through", "arXiv 2610.06479"),
        ("caote", "CAOTE"),
        ("global", "DefensiveKV"),
        ("random", "baseline"),
    ],
)
def test_a_policys_source_is_that_of_what_sets_it_apart(name, source):
    assert describe(name).source.startswith(source)
