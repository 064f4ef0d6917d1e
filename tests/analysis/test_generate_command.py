"""`criticalkv generate` answers on what was kept, and says what that was."""

import json
import re

import pytest
from typer.testing import CliRunner

from analysis.cli.app import app
from analysis.errors import InputError


@pytest.mark.reference
def test_the_command_answers_from_two_fifths_of_the_context(tmp_path):
    path = tmp_path / "context.txt"
    filler = "The river runs through the valley and the mill stands still in the evening light. " * 40
    path.write_text(f"{filler}\nThe code word of the city of Bremen is 4827.\n{filler}")
    asked = [
        "What is the code word of the city of Bremen?",
        "--context",
        str(path),
        "--policy",
        "snapkv+two-stage",
        "--max-new-tokens",
        "24",
    ]
    ran = CliRunner().invoke(app, ["generate", *asked, "--budget", "0.4"])
    assert ran.exit_code == 0, ran.output
    assert "The code word of the city of Bremen is 48" in ran.stdout
    whole = CliRunner().invoke(app, ["generate", *asked, "--budget", "1.0"])
    assert "The code word of the city of Bremen is 4827" in whole.stdout
    assert "(100.0%)" in whole.stderr.replace("\n", " ")
    assert "snapkv+two-stage: 1" in ran.stderr
    share = float(re.search(r"\(([\d.]+)%\)", ran.stderr.replace("\n", " "))[1])
    assert 40 < share < 43
    told = json.loads(CliRunner().invoke(app, ["generate", *asked, "--budget", "0.4", "--json"]).stdout)
    assert told["answer"] == ran.stdout.strip()
    assert (told["policy"], told["evictions"]) == ("snapkv+two-stage", 1)
    assert f"({told['bytes'] / told['full_bytes']:.1%})" in ran.stderr.replace("\n", " ")
    assert told["entries_per_head"] <= 0.4 * told["prompt_tokens"] + told["answer_tokens"]
    chunked = CliRunner().invoke(
        app, ["generate", *asked, "--budget", "200", "--chunk", "300", "--every", "4", "--set", "window=16"]
    )
    assert chunked.exit_code == 0, chunked.output
    held = int(re.search(r"(\d+)\s+entries", chunked.stderr)[1])
    assert 200 <= held <= 204
    times = int(re.search(r"chose\s+(\d+)\s+times", chunked.stderr)[1])
    assert times > 5


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["  "], "the prompt is empty"),
        (["x", "--budget", "1.5"], "--budget is a number of entries"),
        (["x", "--budget", "nan"], "--budget is a number of entries"),
        (["x", "--budget", "0"], "--budget is a number of entries"),
        (["x", "--target", "5"], "needs every="),
        (["x", "--every", "0"], "every must be a whole number"),
        (["x", "--policy", "snapkw"], "did you mean snapkv"),
        (["x", "--set", "windows=3"], "has no parameter windows"),
        (["x", "--set", "window"], "--set takes a parameter and its value"),
        (["x", "--set", "window=0"], "window must be a whole number"),
        (["x", "--context", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["x", "--temperature", "-1"], "--temperature must be"),
    ],
)
def test_a_mistake_is_one_message_before_any_model_is_loaded(asked, message):
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, ["generate", *asked], catch_exceptions=False)


@pytest.mark.reference
def test_a_prompt_longer_than_the_models_positions_is_told(tmp_path):
    path = tmp_path / "context.txt"
    path.write_text("word " * 9000)
    with pytest.raises(InputError, match="more than the 8192 positions"):
        CliRunner().invoke(app, ["generate", "x", "--context", str(path)], catch_exceptions=False)
