"""`criticalkv head-scores` finds the heads that find needles."""

import json

import pytest
import torch
from typer.testing import CliRunner

from analysis.cli.app import app
from analysis.errors import InputError
from analysis.experiments.needles import measure_heads, needles
from eviction import HeadScores

pytestmark = pytest.mark.reference


def test_the_command_writes_scores_of_every_head_and_the_same_again(tmp_path):
    path = tmp_path / "scores.json"
    asked = ["head-scores", "--contexts", "2", "--context-length", "300", "--measure", "copy", "--out", str(path)]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == 0, ran.output
    assert "The heads that look at the needle most" in ran.output
    scores = HeadScores.load(path)
    assert [len(row) for row in scores.scores] == [9] * 30
    assert scores.answered > 0.5
    first = path.read_text()
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert told["scores"] == [list(row) for row in scores.scores]
    assert told["measure"] == "copy"
    assert path.read_text() == first


@torch.no_grad()
def test_heads_that_copy_stand_out_by_both_measures(reference):
    found = {
        measure: torch.tensor(
            measure_heads(reference, contexts=3, context_length=400, measure=measure, seed=1).scores, dtype=torch.float64
        ).flatten()
        for measure in ("headkv", "copy")
    }
    for scores in found.values():
        assert scores.max() > 0.5 > 3 * scores.median()
    best = found["copy"].topk(10).indices
    assert (found["headkv"][best] > found["headkv"].quantile(0.9)).all()


def test_needles_lie_where_they_say_at_depths_from_start_to_end(reference):
    for place, one in enumerate(needles(reference.tokenizer, 3, 300, 0)):
        assert one.tokens.shape[1] + len(one.answer) == 300
        needle = reference.tokenizer.decode(one.tokens[0, one.needle])
        assert reference.tokenizer.decode(one.answer) in needle
        assert needle.strip().startswith("The code word of the city of")
        assert (one.needle.start == 0) == (place == 0)


def test_a_context_too_short_for_the_needle_is_refused(reference):
    with pytest.raises(InputError, match="--context-length 60 leaves"):
        needles(reference.tokenizer, 1, 60, 0)
