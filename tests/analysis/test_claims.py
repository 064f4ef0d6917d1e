"""Each verdict follows from the rows, on both sides of its rule; what has no rows says so, with the command that would make them."""

import math

import pandas as pd
import pytest
import worlds
from hypothesis import given
from hypothesis import strategies as st

from analysis.claims import CLAIMS, Rule, ledger, verdict
from analysis.claims.ledger import measured
from analysis.schema import CLAIMS as TABLE
from analysis.schema import TABLES, VERDICTS
from analysis.statistics import Estimate, student

GOOD, BAD = worlds.world(True), worlds.world(False)
EMPTY = {table.name: table.checked(pd.DataFrame()) for table in TABLES}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_holds_on_rows_in_which_it_does_and_not_on_rows_in_which_it_does_not(claim):
    assert verdict(claim.rule, measured(claim, GOOD)) == "holds", measured(claim, GOOD)
    assert verdict(claim.rule, measured(claim, BAD)) == "does not hold here", measured(claim, BAD)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_without_its_rows_is_not_measured(claim):
    assert verdict(claim.rule, measured(claim, EMPTY)) == "not measured"


def test_the_ledger_is_of_the_declared_form_and_names_setting_and_command():
    found = TABLE.checked(ledger(GOOD, worlds.ABOUT))
    assert list(found["id"]) == [claim.id for claim in CLAIMS]
    assert set(found["verdict"]) <= set(VERDICTS)
    assert found["setting"].str.startswith("made up; ").all()
    assert (found["command"] == "made by hand").all()
    none = ledger(EMPTY, worlds.ABOUT)
    assert (none["verdict"] == "not measured").all()
    assert list(none["command"]) == [claim.command for claim in CLAIMS]
    assert none["value"].isna().all()


def test_ids_are_unique_and_statements_say_the_threshold():
    ids = [claim.id for claim in CLAIMS]
    assert len(set(ids)) == len(ids)
    assert {f"C{number}" for number in range(1, 11)} <= set(ids)
    for claim in CLAIMS:
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
