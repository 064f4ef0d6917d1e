"""Tables hold exactly what they declare, and files give back what was written."""

import known_rows as rows
import pandas as pd
import pyarrow.parquet as pq
import pytest

from analysis.schema import HEADS, LAYERS, RUNS


@pytest.mark.parametrize(("table", "make"), [(HEADS, rows.heads), (LAYERS, rows.layers), (RUNS, rows.runs)])
def test_rows_survive_a_file_and_the_model_is_named_in_it(table, make, tmp_path):
    frame = table.checked(make())
    table.write(frame, tmp_path / table.file, {"name": "a model", "note": "in 4 bits"})
    pd.testing.assert_frame_equal(table.read(tmp_path / table.file), frame)
    metadata = pq.read_schema(tmp_path / table.file).metadata
    assert (metadata[b"name"], metadata[b"note"]) == (b"a model", b"in 4 bits")
    field = pq.read_schema(tmp_path / table.file).field("budget")
    assert b"share of the prompt" in field.metadata[b"meaning"]


def test_the_columns_that_the_issue_names_are_there():
    assert [column.name for column in HEADS.columns] == [
        "context", "layer", "head", "kv_head", "policy", "budget", "queries", "norm", "perturbation", "theta",
        "retained_mass", "retained_share", "stage1_mass", "stage1_share", "violations",
    ]  # fmt: skip
    assert {"perturbation", "coupling", "drift"} < {column.name for column in LAYERS.columns}
    assert {"kl", "agreement", "entries_kept", "bytes"} < {column.name for column in RUNS.columns}


def test_a_missing_and_an_unknown_column_are_refused_by_name():
    with pytest.raises(ValueError, match=r"missing columns \['theta'\], unknown columns \['thata'\]"):
        HEADS.checked(rows.heads().rename(columns={"theta": "thata"}))


def test_an_empty_value_is_refused_where_none_may_be():
    frame = rows.heads()
    frame.loc[3, "theta"] = None
    with pytest.raises(ValueError, match=r"empty values in \['theta'\]"):
        HEADS.checked(frame)


def test_a_row_twice_is_refused():
    frame = rows.runs()
    with pytest.raises(ValueError, match="2 rows repeat"):
        RUNS.checked(pd.concat([frame, frame.head(2)]))
