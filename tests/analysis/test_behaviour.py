"""Exact against estimated, and what follows a choice: rows, figures and the command."""

import json

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import prompt, tiny
from typer.testing import CliRunner

from analysis.cli.app import app
from analysis.errors import InputError
from analysis.experiments.behaviour import (
    by_entry,
    judged,
    passages,
    what_follows,
)
from analysis.statistics import recall
from eviction import policy, prefill, reading
from hooks.forward import forward


class Words:
    """A tokenizer: one token for each word."""

    def __call__(self, text: str, return_tensors: str):
        known: dict[str, int] = {}
        ids = [known.setdefault(word, len(known)) for word in text.split()]
        return type("Encoded", (), {"input_ids": torch.tensor([ids])})()


def test_passages_are_disjoint_and_say_nothing_twice():
    distinct = passages(Words(), 5, 200)
    assert [tuple(one.shape) for one in distinct] == [(1, 200)] * 5
    again = passages(Words(), 5, 200)
    assert all(torch.equal(one, other) for one, other in zip(distinct, again, strict=True))
    (whole,) = passages(Words(), 1, 50_000)
    (repeating,) = passages(Words(), 1, 50_000, repeats=True)
    assert not torch.equal(whole, repeating)
    with pytest.raises(InputError, match="more than the"):
        passages(Words(), 50, 5000)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.randoms())
def test_recall_is_the_share_of_the_top_that_is_found(truth, random):
    guess = truth.copy()
    random.shuffle(guess)
    count = max(round(0.2 * len(truth)), 1)

    def top(values):
        return set(sorted(range(len(values)), key=lambda place: (-values[place], place))[:count])

    assert recall(truth, guess) == len(top(truth) & top(guess)) / count
    assert recall(truth, truth) == 1


@torch.no_grad()
def test_rows_of_entries_and_what_is_made_of_them(tmp_path):
    used, tokens = tiny("llama", dtype=torch.float64), prompt(30)
    rows = by_entry(used, tokens, [0, 2], signs=500, save=tmp_path / "exact.safetensors")
    assert len(rows) == 2 * 2 * 29
    assert list(rows.columns[:4]) == ["layer", "kv_head", "entry", "exact"]
    assert rows["exact"].gt(0).all()
    found = judged(rows).set_index(["estimate", "layer"])
    for layer in (0, 2):
        part = rows[rows["layer"] == layer]
        expected = part["exact"].rank().corr(part["fisher"].rank())
        assert found.loc[("fisher", layer), "spearman"] == pytest.approx(expected)
        assert found.loc[("fisher", layer), "spearman"] > 0.99
        assert found.loc[("fisher", layer), "nats"] == pytest.approx((part["fisher"] / part["exact"]).median())
        assert found.loc[("attention", layer), "spearman"] < found.loc[("fisher", layer), "spearman"]
    assert found["nats"].isna().loc["attention"].all()


@torch.no_grad()
def test_what_follows_is_what_a_compressed_cache_says():
    used, tokens = tiny("llama", dtype=torch.float64), prompt(46)
    before, after = tokens[:, :40], tokens[:, 40:]
    chosen = {name: policy(name, window=4) for name in ("snapkv", "fisher", "adakv")}
    found = what_follows(used, before, after, chosen, (0.3, 0.6)).set_index(["policy", "budget"])
    full = used(tokens).logits[0, 40:].log_softmax(-1)
    for name, one in chosen.items():
        for budget in (0.3, 0.6):
            cache = prefill(used, before, one, budget).cache
            with reading(used):
                evicted = forward(used, after, cache)[0].log_softmax(-1)
            kl = (full.exp() * (full - evicted)).sum(-1).mean()
            assert found.loc[(name, budget), "kl"] == pytest.approx(float(kl), rel=1e-6)
            same = (full.argmax(-1) == evicted.argmax(-1)).double().mean()
            assert found.loc[(name, budget), "agreement"] == float(same)


@pytest.mark.reference
def test_the_command_writes_every_entry_and_goes_on(tmp_path):
    path = tmp_path / "loo.parquet"
    asked = ["leave-one-out", "--context-length", "24", "--every", "15", "--out", str(path)]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == 0, ran.output
    assert "rank correlation" in ran.output
    rows = pd.read_parquet(path)
    assert len(rows) == 2 * 3 * 23
    assert rows["exact"].gt(0).all()
    written = (tmp_path / "loo.parquet.safetensors").read_bytes()
    ran = CliRunner().invoke(app, [*asked, "--signs", "64", "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert (told["tokens"], told["layers"], told["removals"]) == (24, [0, 15], len(rows))
    assert {row["estimate"] for row in told["estimates"]} > {"fisher", "attention"}
    assert (tmp_path / "loo.parquet.safetensors").read_bytes() == written  # nothing was measured again
    ran = CliRunner().invoke(app, [*asked, "--seed", "3"])
    assert isinstance(ran.exception, InputError)
    assert "another model, dtype or prompt" in str(ran.exception)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--every", "0"], "--every must be at least 1"),
        (["--context-length", "2"], "--context-length must be at least 3"),
        (["--out", "nowhere/x.parquet"], "there is no folder"),
        (["--context", "nowhere.txt"], "cannot be read"),
    ],
)
def test_mistakes_are_told(more, message):
    ran = CliRunner().invoke(app, ["leave-one-out", *more])
    assert isinstance(ran.exception, InputError)
    assert message in str(ran.exception)
