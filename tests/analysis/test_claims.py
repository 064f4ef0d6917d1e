"""Each verdict follows from the rows, on both sides of its rule; what has no rows says so, with the command that would make them."""

import math

import numpy as np
import pandas as pd
import pytest
import worlds
from hypothesis import given
from hypothesis import strategies as st

from analysis.claims import CLAIMS, Rule, ledger, verdict
from analysis.claims.ledger import Looked, measured
from analysis.schema import CLAIMS as TABLE
from analysis.schema import TABLES, VERDICTS
from analysis.statistics import Estimate, largest_mean, student

GOOD, BAD = worlds.world(True), worlds.world(False)
EMPTY = {table.name: table.checked(pd.DataFrame()) for table in TABLES}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_holds_on_rows_in_which_it_does_and_not_on_rows_in_which_it_does_not(claim):
    for world, said in ((GOOD, "holds"), (BAD, "does not hold here")):
        expected = said if claim.rule.only in (None, said) else "undecided"
        assert verdict(claim.rule, measured(claim, world)) == expected, measured(claim, world)


def test_what_a_bound_alone_decides_is_decided_on_its_side_only():
    sided = {claim.id: claim.rule.only for claim in CLAIMS if claim.rule.only}
    assert sided == {"Q2": "holds", "Q2.truth": "does not hold here"}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_without_its_rows_is_not_measured(claim):
    assert verdict(claim.rule, measured(claim, Looked(EMPTY))) == "not measured"


def found(claim, **tables):
    claim = next(one for one in CLAIMS if one.id == claim)
    return verdict(claim.rule, measured(claim, Looked({**GOOD, **tables})))


def test_c4_holds_at_every_declared_budget_or_not_at_all():
    heads = GOOD["heads"]
    narrow = heads["policy"] == "snapkv+two-stage:window=16"
    for budget in (0.025, 0.05, 0.1, 0.2, 0.4):
        there = narrow & (heads["budget"] == budget)
        worse = heads.assign(perturbation=heads["perturbation"].where(~there, 2 * heads["perturbation"]))
        assert found("C4", heads=worse) == "does not hold here", budget
        assert found("C4", heads=heads[~there]) == "not measured", budget
    beyond = narrow & (heads["budget"] == 0.8)
    assert (
        found("C4", heads=heads.assign(perturbation=heads["perturbation"].where(~beyond, 2 * heads["perturbation"]))) == "holds"
    )


def test_head_scores_of_two_files_are_two_pairs():
    samples = GOOD["samples"]
    other = samples[samples["policy"].str.startswith("headkv")]
    other = other.assign(policy=other["policy"].str.replace("some/where", "C:else"))
    assert found("C7.headkv", samples=pd.concat([samples, other], ignore_index=True)) == "holds"
    alone = samples[~samples["policy"].str.startswith("headkv+")]
    assert found("C7.headkv", samples=alone) == "not measured"


def test_lengths_of_one_text_count_once():
    about = {**worlds.ABOUT, "independent": ["a"]}
    ledgers = ledger(GOOD, about).set_index("id")
    assert ledgers.loc["C2", "verdict"] == "undecided"
    assert "1 context of 100 tokens" in ledgers.loc["C2", "setting"]


def test_what_was_not_measured_says_why_and_how_with_the_runs_own_settings():
    settings = {
        **worlds.ABOUT["settings"],
        "model": "some/model",
        "context_files": ["a text.txt"],
        "budgets": [0.1, 0.3],
        "window": 16,
    }
    about = {**worlds.ABOUT, "settings": settings, "refused": {"entries": "the model is too large"}}
    row = ledger({**GOOD, "entries": EMPTY["entries"]}, about).set_index("id").loc["O3"]
    assert row["verdict"] == "not measured"
    assert row["setting"].endswith("; the model is too large")
    assert row["command"].startswith("criticalkv validate --model some/model --context 'a text.txt' ")
    assert row["command"].endswith("--window 16 --later 8 --budgets 0.1,0.3 --leave-one-out 128")
    about["refused"] = {"fisher": "states cannot be run again", "least L found": "gated"}
    none = ledger(EMPTY, about).set_index("id")
    why = none["setting"].str.extract("(; states cannot be run again|; gated)$")[0].dropna()
    assert why.to_dict() == {
        **dict.fromkeys(["B1", "B2", "B4", "B5", "O6"], "; states cannot be run again"),
        "Q2.truth": "; gated",
    }
    none = none["command"]
    assert (
        none["C5"]
        == "criticalkv ablate alpha --model some/model --context 'a text.txt' --context-length 100 --window 16 --later 8"
    )
    assert none["C9"].startswith("criticalkv evaluate --model some/model --task longbench ")


def test_the_ledger_is_of_the_declared_form_and_names_setting_and_command():
    found = TABLE.checked(ledger(GOOD, worlds.ABOUT))
    assert list(found["id"]) == [claim.id for claim in CLAIMS]
    assert set(found["verdict"]) <= set(VERDICTS)
    assert found["setting"].str.startswith("made up; ").all()
    assert (found["command"] == "made by hand").all()
    none = ledger(EMPTY, worlds.ABOUT)
    assert (none["verdict"] == "not measured").all()
    assert not none["command"].str.contains("[{}]").any()
    assert not found["setting"].str.contains("[{}]").any()
    assert none["value"].isna().all()


def test_ids_are_unique_and_statements_say_the_threshold():
    ids = [claim.id for claim in CLAIMS]
    assert len(set(ids)) == len(ids)
    assert {f"C{number}" for number in range(1, 11)} <= set(ids)
    for claim in CLAIMS:
        assert claim.decided_by.endswith(f"[{claim.quantity} {claim.rule}]")
        assert claim.quantity
        assert claim.source
        assert claim.how
        assert claim.command.startswith("criticalkv ")


@pytest.mark.parametrize(
    ("rule", "found", "expected"),
    [
        (Rule("above", 0.5), (0.6, 0.51, 0.7), "holds"),
        (Rule("above", 0.5), (0.4, 0.3, 0.5), "does not hold here"),
        (Rule("above", 0.5), (0.6, 0.5, 0.7), "undecided"),
        (Rule("below", 0), (-1.0, -2.0, -0.1), "holds"),
        (Rule("below", 0), (1.0, 0.0, 2.0), "does not hold here"),
        (Rule("below", 0), (-1.0, -2.0, 0.0), "undecided"),
        (Rule("within", 0.1), (0.0, -0.1, 0.1), "holds"),
        (Rule("within", 0.1), (0.3, 0.11, 0.5), "does not hold here"),
        (Rule("within", 0.1), (-0.3, -0.5, -0.11), "does not hold here"),
        (Rule("within", 0.1), (0.0, -0.2, 0.05), "undecided"),
        (Rule("below", 0.1, only="holds"), (0.0, -1.0, 0.05), "holds"),
        (Rule("below", 0.1, only="holds"), (0.4, 0.3, 0.5), "undecided"),
        (Rule("below", 0.1, only="does not hold here"), (0.0, -1.0, 0.05), "undecided"),
        (Rule("below", 0.1, only="does not hold here"), (0.4, 0.3, 0.5), "does not hold here"),
        (Rule("exactly", 0), (0.0, math.nan, math.nan), "holds"),
        (Rule("exactly", 0), (1.0, math.nan, math.nan), "does not hold here"),
        (Rule("above", 0.5), (0.9, math.nan, math.nan), "undecided"),
        (Rule("above", 0.5), (math.nan, math.nan, math.nan), "not measured"),
    ],
)
def test_a_verdict_needs_the_whole_interval(rule, found, expected):
    assert verdict(rule, Estimate(*found)) == expected


def test_one_context_decides_nothing_but_a_theorem():
    one = {name: frame[frame["context"] == "a"] if "context" in frame else frame for name, frame in GOOD.items()}
    found = ledger(one, worlds.ABOUT).set_index("id")["verdict"]
    assert found["C2"] == "undecided"
    assert found["O1"] == "holds"


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_students_interval_is_that_of_the_textbook(values):
    found = student(values)
    count = len(values)
    centre = sum(values) / count
    spread = math.sqrt(sum((value - centre) ** 2 for value in values) / (count - 1) / count)
    # the 97.5 % point of Student's t for 1 to 11 degrees of freedom, from tables
    point = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)[count - 2]
    assert found.value == pytest.approx(centre, abs=1e-9)
    assert found.high - found.value == pytest.approx(point * spread, rel=1e-3, abs=1e-6)
    assert found.value - found.low == pytest.approx(point * spread, rel=1e-3, abs=1e-6)


@given(st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=6), min_size=1, max_size=5))
def test_the_largest_mean_lies_between_the_largest_ends_of_wider_intervals(groups):
    found = largest_mean(groups)
    assert found.value == max(student(group).value for group in groups)
    each = [student(group, 1 - 0.05 / len(groups)) for group in groups]
    assert found.low == max(one.low for one in each)
    assert found.high == max(one.high for one in each)
    assert found.low <= found.value <= found.high


def test_the_largest_mean_of_nothing_is_refused_and_of_single_values_has_no_interval():
    with pytest.raises(ValueError, match="no group"):
        largest_mean([])
    assert math.isnan(largest_mean([[1.0, 2.0], [3.0]]).low)


def test_the_interval_of_the_largest_mean_covers_it_as_often_as_it_says():
    """Five groups of eight around known means, three of them equal: 4 000 draws."""
    random = np.random.default_rng(0)
    means = np.array([0.0, 0.0, 0.0, -1.0, -0.2])
    covered = 0
    for _ in range(4_000):
        drawn = largest_mean(list(means[:, None] + random.normal(size=(5, 8))))
        covered += drawn.low <= means.max() <= drawn.high
    assert covered / 4_000 >= 0.95
