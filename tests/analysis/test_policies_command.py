"""The commands that tell what policies there are."""

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from analysis.cli.app import app
from analysis.cli.options import say
from analysis.errors import InputError
from eviction import names


def run(*arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})


def test_policies_lists_bases_selections_and_sources():
    shown = run("policies")
    assert shown.exit_code == 0
    for word in ("snapkv+two-stage", "adakv", "layer-defensivekv", "arXiv 2406.02069", f"{len(names())} names"):
        assert word in shown.output
    listed = json.loads(run("policies", "--json").output)
    assert [one["name"] for one in listed] == names()


@pytest.mark.parametrize("name", ["snapkv", "adakv+two-stage", "headkv", "caote", "random+norm"])
def test_explain_tells_formula_paper_parameters_and_needs(name):
    shown = run("explain", name)
    assert shown.exit_code == 0
    for word in (name, "accumulate", "allocate", "select", "looking at"):
        assert word in shown.output


def test_explain_is_one_json_object_where_that_is_asked_for():
    said = json.loads(run("explain", "adakv+two-stage", "--json").output)
    assert said["name"] == "adakv+two-stage"
    assert [verb[0] for verb in said["verbs"]] == ["accumulate", "allocate", "select"]


def test_explain_shows_what_a_name_changes_and_what_is_needed():
    assert "space = 'value'" in run("explain", "caote").output
    assert "scores = needed" in run("explain", "headkv").output
    assert "alpha = 0.5" in run("explain", "snapkv+two-stage").output


def test_a_mistyped_name_is_one_line_with_a_suggestion():
    with pytest.raises(InputError, match="did you mean adakv"):
        CliRunner().invoke(app, ["explain", "adavk"], catch_exceptions=False)


def test_what_json_cannot_hold_is_null_at_any_depth(capsys):
    say({"a": float("nan"), "b": [1.0, {"c": float("inf")}], "d": Path("x"), "e": pd.DataFrame({"f": [float("nan")]})})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.0, {"c": None}], "d": "x", "e": [{"f": None}]}


def test_the_list_has_every_policy_with_a_name_of_its_own():
    shown = run("policies").output
    for name in ("fisher+greedy", "straight-through+greedy", "caote", "snapkv+two-stage"):
        assert name in shown
    assert "adakv+norm" not in shown
