"""The summaries' numbers, where the answers are known."""

import known_rows as rows
import pytest

from analysis.report.tables import behaviour_table, perturbation_table
from analysis.summary import behaviour_summary, perturbation_summary, relative_change, violations


def test_relative_change_is_per_head_against_attention_only():
    change = relative_change(rows.heads())
    assert len(change) == 2 * 2 * 2 * 2 * 3
    assert set(change[change["head"] == 0]["change"]) == {-0.5}
    assert set(change[change["head"] == 1]["change"]) == {0.25}
    assert (change["improved"] == (change["head"] == 0)).all()
    same = rows.heads().assign(perturbation=1.0)
    assert set(relative_change(same)["improved"]) == {0.5}


def test_heads_that_nothing_perturbs_are_left_out_not_divided_by():
    heads = rows.heads()
    heads.loc[(heads["layer"] == 1) & (heads["policy"] == "snapkv"), "perturbation"] = 0.0
    assert set(relative_change(heads)["layer"]) == {0}


def test_perturbation_summary_of_known_rows():
    summary = perturbation_summary(rows.heads()).set_index(["queries", "budget"])
    row = summary.loc["first", 0.1]
    assert row["improved"] == 0.5
    assert row["mean_change"] == pytest.approx((-0.5 + 0.25) / 2)
    assert row["median_change"] == pytest.approx((-0.5 + 0.25) / 2)
    assert row["total_change"] == pytest.approx((0.5 + 1.25) / 2 - 1)
    assert (row["sigma_share"], row["stage1_share"]) == (0.75, 0.5)
    assert row["tightness"] == pytest.approx(4)
    assert len(summary) == 6


def test_behaviour_summary_of_known_rows():
    summary = behaviour_summary(rows.runs()).set_index(["policy", "budget"])
    assert summary.loc[("snapkv", 0.2), "kl"] == pytest.approx(0.7)
    assert summary.loc[("snapkv+two-stage", 0.2), "bytes_share"] == pytest.approx(0.2)
    assert len(summary) == 4


def test_violations_are_counted_over_all_rows():
    heads = rows.heads()
    assert violations(heads) == 0
    heads.loc[[2, 5], "violations"] = [3, 1]
    assert violations(heads) == 4


def test_tables_for_people_carry_signs_and_units():
    table = perturbation_table(perturbation_summary(rows.heads()))
    assert list(table["queries"].unique()) == ["window", "first", "later"]
    first = table.iloc[0]
    assert (first["cache"], first["improved"], first["mean ΔL"], first["θ / L"]) == ("10.0 %", "50.0 %", "-12.5 %", "4.0")
    assert behaviour_table(behaviour_summary(rows.runs())).iloc[0]["KL (nats)"] == "0.7000"
