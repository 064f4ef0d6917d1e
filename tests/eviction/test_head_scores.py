"""Head scores are what their papers say, and make budgets."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import prompt, tiny

from eviction import HeadScores, policy, prefill
from eviction.head_scores import copied, needle_mass


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_scores_are_those_of_the_loops(seed, keys, queries, tied):
    rng = np.random.default_rng(seed)
    raw = rng.integers(1, 4, (2, queries, keys)).astype(float) if tied else rng.random((2, queries, keys))
    weights = raw / raw.sum(-1, keepdims=True)
    start = int(rng.integers(0, keys))
    needle = slice(start, int(rng.integers(start + 1, keys + 1)))
    tokens, answer = rng.integers(0, 3, keys), rng.integers(0, 3, queries)
    for h in range(2):
        mass, hits = 0.0, 0
        for t in range(queries):
            order = sorted(range(keys), key=lambda i: (-weights[h, t, i], i))
            inside = range(needle.start, needle.stop)
            mass += sum(weights[h, t, i] for i in order[: len(inside)] if i in inside) / queries
            hits += order[0] in inside and tokens[order[0]] == answer[t]
        got = needle_mass(torch.from_numpy(weights), needle)[h]
        np.testing.assert_allclose(got, mass, rtol=1e-12, atol=1e-15)
        assert float(copied(torch.from_numpy(weights), needle, torch.from_numpy(tokens), torch.from_numpy(answer))[h]) == (
            hits / queries
        )


def test_scores_come_back_from_their_file_and_make_headkvs_budgets(tmp_path):
    scores = HeadScores(((0.0, 0.0, 0.5, 0.9),) * 3, "tiny", "copy", 2, 100, 0, 0.5)
    scores.save(tmp_path / "scores.json")
    loaded = HeadScores.load(tmp_path / "scores.json")
    assert loaded == scores
    chosen = policy("headkv", scores=loaded.scores, window=4, kernel=3)
    counts = [decision.keep.sum(-1)[0].tolist() for decision in prefill(tiny("llama"), prompt(40), chosen, 12).decisions]
    assert all(low < high for low, high in counts)
    assert sum(map(sum, counts)) == 12 * 6


def test_files_that_hold_no_scores_are_refused(tmp_path):
    path = tmp_path / "scores.json"
    good = {"model": "m", "measure": "copy", "contexts": 1, "context_length": 9, "seed": 0, "answered": 1.0}
    for content, message in (
        ("no json", "holds no head scores"),
        (json.dumps(good), "holds no head scores: 'scores'"),
        (json.dumps({**good, "scores": [[1.0]], "more": 1}), "more"),
        (json.dumps({**good, "scores": [[-1.0]]}), "below 0"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            HeadScores.load(path)
