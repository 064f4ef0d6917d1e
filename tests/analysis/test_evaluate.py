"""`criticalkv evaluate`: rows that are kept as they come, tables made of them, and messages before any model time is spent."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from tokens import tokenizer
from typer.testing import CliRunner

import analysis.experiments.engines as engines
from analysis.cli.app import app
from analysis.errors import InputError
from analysis.experiments.answering import Answering
from analysis.experiments.evaluate import evaluate
from analysis.experiments.prompts import by_context, prompt, require_room
from analysis.experiments.store import Store
from analysis.experiments.study import code, compute, plan, policies
from analysis.grid import Grid, budgets, split_policy
from analysis.schema import FULL, SAMPLES, SCORES
from analysis.scores import scores
from analysis.tasks import Sample, register, unregister
from eviction import HeadScores
from hooks.errors import ModelUnavailable
from hooks.reference import LoadedModel
from hooks.tiny import tiny_model

POLICIES = ("snapkv:window=4:kernel=3", "random:recent=3")
GRID = Grid(
    models=("tiny",),
    tasks=("needle", "fidelity"),
    lengths=(240, 300),
    policies=POLICIES,
    budgets=(0.3, 24),
    samples=2,
    max_new_tokens=4,
    judge=2,
)


@pytest.fixture(scope="module")
def loaded() -> dict[str, LoadedModel]:
    made = tiny_model("llama", vocab_size=500, max_position_embeddings=512)
    return {"tiny": LoadedModel(made, tokenizer(), "tiny", "random")}


def rows_file(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROW = {
    "context": "The door of the house is red, and the wall is white. " * 4,
    "question": "What is red?",
    "answer_prefix": " It is",
    "answer": ["door"],
    "task": "mine",
    "max_new_tokens": 4,
}


def test_a_row_for_each_sample_policy_and_budget(loaded, tmp_path):
    seen = []
    found = evaluate(GRID, tmp_path / "run", loaded=loaded, report=lambda done, total, what: seen.append((done, total)))
    frame = found.samples
    assert len(frame) == 2 * 2 * 2 * (1 + 2 * 2)
    assert set(frame["policy"]) == {FULL, *POLICIES}
    assert set(frame["length"]) == {240, 300}
    assert set(frame["question"]) == {"unseen"}
    assert seen[-1] == (40, 40)
    pd.testing.assert_frame_equal(SAMPLES.read(tmp_path / "run" / "samples.parquet"), frame)
    pd.testing.assert_frame_equal(SCORES.read(tmp_path / "run" / "scores.parquet"), scores(frame))
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["settings"]["policies"] == list(POLICIES)
    assert about["provenance"]["versions"]["torch"] == torch.__version__
    assert frame["depth"].notna().eq(frame["source"] == "needle").all()
    assert (frame.loc[frame["policy"] != FULL, "perturbation"] > 0).all()
    kept = frame[(frame["policy"] == POLICIES[0]) & (frame["budget"] == 24)]
    assert (kept["entries_kept"] == 24).all()
    assert not found.failures


def test_a_run_goes_on_where_it_was_stopped_and_nothing_is_computed_twice(loaded, tmp_path, monkeypatch):
    whole = evaluate(GRID, tmp_path / "whole", loaded=loaded).samples
    asked, original = [], Answering.row

    def counted(self, one, cell):
        if len(asked) == stops[0]:
            raise KeyboardInterrupt
        asked.append((one.sample.task, one.sample.length, one.sample.number, cell))
        return original(self, one, cell)

    monkeypatch.setattr(Answering, "row", counted)
    stops = [1, 7, 8, 23, 39, -1]
    while stops[0] > 0:
        with pytest.raises(KeyboardInterrupt):
            evaluate(GRID, tmp_path / "run", loaded=loaded)
        del stops[0]
    again = evaluate(GRID, tmp_path / "run", loaded=loaded).samples
    assert len(asked) == len(set(asked)) == 40
    pd.testing.assert_frame_equal(again, whole)
    more = evaluate(replace(GRID, budgets=(0.3, 24, 0.5)), tmp_path / "run", loaded=loaded).samples
    assert len(asked) == 40 + 16
    pd.testing.assert_frame_equal(more[more["budget"] != 0.5].reset_index(drop=True), whole)


def test_ids_are_those_of_what_is_measured(loaded):
    def ids(grid):
        groups = plan(grid, "tiny", loaded["tiny"].tokenizer, 512)
        return {cell.id for group in groups for cell in group.cells}

    first = ids(GRID)
    assert len(first) == 40
    assert ids(replace(GRID, tasks=GRID.tasks[::-1], budgets=GRID.budgets[::-1])) == first
    assert len(code()) == 64
    for changes in (
        {"seeds": (1,)},
        {"aware": True},
        {"raw": True, "tasks": ("needle",)},
        {"judge": 3},
        {"dtype": "float64"},
        {"max_new_tokens": 5},
        {"depths": 2, "tasks": ("needle",)},
    ):
        other = ids(replace(GRID, **changes))
        # a needle of sample 0 stands at the start whatever the depths
        assert not other & first or "depths" in changes, changes
        assert other != first


def test_a_users_task_at_two_lengths_has_cells_of_its_own_and_its_metric_is_a_part_of_them(loaded, tmp_path):
    def made(asked):
        return pd.DataFrame([{**ROW, "task": "doors"}] * asked.samples)

    def asked(metric, out=None):
        register("doors", metric=metric)(made)
        try:
            grid = replace(GRID, tasks=("doors",), lengths=(100, 200))
            if out is not None:
                return evaluate(grid, out, loaded=loaded)
            return {cell.id for group in plan(grid, "tiny", tokenizer(), 512) for cell in group.cells}
        finally:
            unregister("doors")

    found = [asked("part"), asked("exact"), asked(lambda prediction, sample: 1.0), asked(lambda prediction, sample: 0.0)]
    assert [len(one) for one in found] == [20] * 4
    assert len(set.union(*found)) == 80
    assert set(asked("part", tmp_path / "run").samples["length"]) == {100, 200}
    with pytest.raises(InputError, match=r"a score lies in \[0, 1\], not at 85; mend the metric of doors"):
        asked(lambda prediction, sample: 85.0, tmp_path / "beyond")


def test_questions_of_one_context_share_a_prefill(loaded, tmp_path):
    rows = [ROW, {**ROW, "context": "Another text. " * 20}, {**ROW, "question": "What is white?", "answer": ["wall"]}]
    path = rows_file(tmp_path / "rows.jsonl", rows)
    grid = replace(GRID, tasks=(path,), samples=10)
    groups = plan(grid, "tiny", tokenizer(), 512)
    assert [len(group.prompts) for group in groups] == [2, 1]
    assert [len(group.prompts) for group in plan(replace(grid, aware=True), "tiny", tokenizer(), 512)] == [1, 1, 1]
    chosen, together = policies(grid), {}
    for group in groups:
        together |= dict(compute(loaded["tiny"], chosen, grid.judge, group, {one.id for one in group.cells}))
    apart = {}
    for group in groups:
        for place in range(len(group.prompts)):
            apart |= dict(
                compute(
                    loaded["tiny"], policies(grid), grid.judge, group, {one.id for one in group.cells if one.prompt == place}
                )
            )
    assert apart == together
    numbers = [row["sample"] for row in together.values()]
    assert sorted(numbers) == [0] * 5 + [1] * 5 + [2] * 5
    found = evaluate(grid, tmp_path / "run", loaded=loaded).samples
    assert set(found["source"]) == {path}
    assert set(found["task"]) == {"mine"}
    assert set(found["length"]) == {0}


def test_a_cell_that_fails_is_tried_again_and_told_and_the_others_are_kept(loaded, tmp_path, monkeypatch):
    tries, original = [], Answering.row

    def failing(self, one, cell):
        if cell == (POLICIES[1], 24):
            tries.append(one)
            if len(tries) != 2:  # the first cell's second try works
                raise RuntimeError("the moon is full")
        return original(self, one, cell)

    monkeypatch.setattr(Answering, "row", failing)
    found = evaluate(replace(GRID, tasks=("needle",), lengths=(240,)), tmp_path / "run", loaded=loaded)
    assert len(found.samples) == 9
    assert list(found.failures.values()) == ["RuntimeError: the moon is full"]
    assert len(tries) == 4
    monkeypatch.setattr(Answering, "row", original)
    again = evaluate(replace(GRID, tasks=("needle",), lengths=(240,)), tmp_path / "run", loaded=loaded)
    assert len(again.samples) == 10
    assert not again.failures


class TestBeforeAnyModelTime:
    """Everything here is refused without a forward pass, most of it without the weights."""

    @pytest.fixture(autouse=True)
    def no_model(self, monkeypatch):
        monkeypatch.setattr(engines, "load_for", lambda grid, model: pytest.fail("the model was loaded"))
        monkeypatch.setattr(engines, "compute", lambda *args: pytest.fail("the model was run"))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tasks": ("nedle",)}, "no task is called 'nedle'; did you mean needle"),
            ({"policies": ("snapvk",)}, "--policies snapvk: no policy is called 'snapvk'; did you mean snapkv"),
            ({"policies": ("snapkv:size=3",)}, "--policies snapkv:size=3: snapkv has no parameter size"),
            ({"policies": ("snapkv:window",)}, "a policy's parameters are written as"),
            ({"metric": "best"}, "no metric is called 'best'"),
            ({"haystack": Path("/none.txt")}, "--haystack /none.txt cannot be read: No such file"),
            ({"device": "cuda:7"}, "--device cuda:7 is not available"),
            ({"lengths": (30,)}, "a context length of 30 tokens is too short"),
            ({"lengths": (600,)}, r"needle, row 0: \d+ tokens and 4 of the answer exceed the 512 positions of tiny"),
            ({"tasks": ("qa_1",)}, "qa_1 reads a data set"),
            ({"tasks": ("/none.jsonl",)}, "there is no file /none.jsonl"),
        ],
    )
    def test_a_setting_that_cannot_be(self, loaded, tmp_path, changes, message):
        with pytest.raises(InputError, match=message):
            evaluate(replace(GRID, **changes), tmp_path / "run", loaded=loaded)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({key: value for key, value in ROW.items() if key != "question"}, "has no column question"),
            ({**ROW, "answer": []}, "row 0: answer must be"),
            ({**ROW, "context": "word " * 600}, r"mine, row 0: \d+ tokens and 4 of the answer exceed the 512 positions"),
            ({**ROW, "context": f"<<here the question begins>> {ROW['context']}"}, "or the context holds"),
        ],
    )
    def test_a_row_that_cannot_be(self, loaded, tmp_path, row, message):
        path = rows_file(tmp_path / "rows.jsonl", [row])
        with pytest.raises(InputError, match=message):
            evaluate(replace(GRID, tasks=(path,)), tmp_path / "run", loaded=loaded)
        assert not (tmp_path / "run").exists()

    def test_a_model_that_is_not_there(self, tmp_path):
        with pytest.raises(ModelUnavailable, match="cannot load the model 'tiny'"):
            evaluate(GRID, tmp_path / "run")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"lengths": ()}, "--context-length names nothing"),
            ({"lengths": (0,)}, "--context-length must be a whole number of at least 1, not 0"),
            ({"samples": 0}, "--samples must be"),
            ({"budgets": (0.0,)}, r"a budget is a share of the cache in \(0, 1\], such as 0.2, or at least 2 entries"),
            ({"budgets": (1,)}, "not 1"),
            ({"budgets": (0.2, 0.2)}, "--budgets names 0.2 twice"),
            ({"budgets": ()}, "policies need budgets"),
            ({"dtype": "int8"}, "--dtype is one of"),
            ({"seeds": (-1,)}, "--seed must be"),
            ({"judge": -1}, "--judge must be"),
            ({"max_new_tokens": 0}, "--max-new-tokens must be"),
        ],
    )
    def test_a_grid_that_is_none(self, changes, message):
        with pytest.raises(InputError, match=message):
            replace(GRID, **changes)


class TestStore:
    def test_one_run_at_a_time(self, tmp_path):
        with Store(tmp_path / "run"), pytest.raises(InputError, match="is in use by another run"):
            Store(tmp_path / "run")
        with Store(tmp_path / "run") as again:
            assert again.done() == set()

    def test_a_folder_of_something_else_is_left_alone(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match=r"is not empty and holds no run \(it holds notes.txt\)"):
            Store(tmp_path)
        with pytest.raises(InputError, match="is a file; name a folder"):
            Store(tmp_path / "notes.txt")
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_a_damaged_file_is_told(self, tmp_path):
        (tmp_path / "cells.sqlite").write_bytes(b"no database at all" * 100)
        with pytest.raises(InputError, match=r"cells\.sqlite cannot be used: file is not a database"):
            Store(tmp_path)

    def test_rows_come_back_as_they_were(self, tmp_path):
        row = {"text": "ε “quoted”\n\x00", "number": 0.1 + 0.2, "none": None, "nan": float("nan")}
        with Store(tmp_path / "run") as store:
            store.put("a", row)
            store.fail("b", "ValueError: no")
            store.note("grid 0", {"x": 1})
        with Store(tmp_path / "run") as store:
            (found,) = store.rows(["b", "a", "c"])
            assert str(found) == str({**row, "cell": "a"})
            assert store.done() == {"a"}
            assert store.failures() == {"b": "ValueError: no"}
            store.put("b", row)
            assert store.failures() == {}
            assert store.notes("grid") == {"grid 0": {"x": 1}}


def test_a_tokenizer_that_begins_with_a_token_begins_the_context_with_it():
    plain = tokenizer(template=False)
    sample = Sample("t", 0, "Some text.", "A question", "", ("a",), 4)
    one = prompt(plain, sample, "all", aware=False, raw=False, forced=False)
    assert plain.decode(one.context[0]) == "Some text."
    nothing = prompt(plain, replace(sample, question=""), "all", aware=False, raw=False, forced=False)
    assert plain.decode(torch.cat([nothing.context, nothing.opening], 1)[0]) == "Some text."
    assert nothing.opening.shape == (1, 1)
    require_room([one], None, "a model")
    assert by_context([one, nothing, one]) == [[one, one], [nothing]]


def test_budgets_and_policies_are_read_from_text():
    assert budgets("0.1, 512,1.0") == (0.1, 512, 1.0)
    assert split_policy("h2o:recent=0.5:kind=a") == ("h2o", {"recent": 0.5, "kind": "a"})
    with pytest.raises(InputError, match="--budgets takes numbers separated by commas"):
        budgets("0.1;0.2")


class TestCommand:
    def run(self, *args):
        return CliRunner().invoke(app, ["evaluate", *map(str, args)])

    @pytest.mark.reference
    def test_a_users_task_and_a_file_from_the_command_line(self, tmp_path):
        mine = tmp_path / "mine.py"
        mine.write_text(
            "import pandas as pd\n"
            "from analysis.tasks import register\n"
            "@register('doors', metric='part')\n"
            "def doors(asked):\n"
            f"    return pd.DataFrame([{ROW!r}] * asked.samples).assign(task='doors')\n"
        )
        asked = ["--import", mine, "--task", "doors", "--samples", 1, "--policies", "snapkv:window=8", "--budgets", "0.5,32"]
        ran = subprocess.run(
            [sys.executable, "-c", "from analysis.cli.app import main; main()", "evaluate", *map(str, asked), "--out", tmp_path / "run"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert "snapkv:window=8" in ran.stdout
        assert "question unseen, 1 samples" in ran.stdout
        assert "32" in ran.stdout
        assert len(SAMPLES.read(tmp_path / "run" / "samples.parquet")) == 3

    def test_a_mistake_is_one_line_and_exit_code_2(self, tmp_path):
        for asked, message in (
            (["--task", "nedle"], "did you mean needle"),
            (["--budgets", "a"], "--budgets takes numbers"),
            (["--context-length", "1k"], "--context-length takes whole numbers"),
            (["--task", ","], "--task names nothing"),
            (["--import", tmp_path / "none.py"], "there is no such file"),
        ):
            result = self.run(*asked, "--out", tmp_path / "run")
            assert isinstance(result.exception, InputError), asked
            assert message in str(result.exception)
        broken = tmp_path / "broken.py"
        broken.write_text("1 / 0")
        assert "raised ZeroDivisionError: division by zero" in str(self.run("--import", broken).exception)
        assert not (tmp_path / "run").exists()


def test_head_scores_may_be_named_by_their_file(tmp_path):
    path = tmp_path / "scores.json"
    HeadScores(((0.5, 0.25), (0.125, 1.0)), "m", "headkv", 1, 100, 0, 1.0).save(path)
    text = f"headkv:scores={path}"
    assert policies(Grid(policies=(text,), budgets=(0.2,)))[text].allocate.scores == ((0.5, 0.25), (0.125, 1.0))
    with pytest.raises(InputError, match="No such file"):
        policies(Grid(policies=(f"headkv:scores={tmp_path / 'none.json'}",), budgets=(0.2,)))
    path.write_text("[]")
    with pytest.raises(InputError, match="holds no head scores"):
        policies(Grid(policies=(text,), budgets=(0.2,)))
