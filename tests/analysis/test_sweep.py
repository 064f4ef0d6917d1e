"""A sweep survives anything and wastes nothing: killed at any moment, on other workers, on a full disk; status, comparison and merging."""

import errno
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from known_rows import samples
from tokens import tokenizer
from typer.testing import CliRunner

from analysis.cli.app import app
from analysis.comparison import compared, read_run
from analysis.errors import InputError
from analysis.experiments.engines import Job, Ray, Worker, carried
from analysis.experiments.evaluate import evaluate
from analysis.experiments.merging import merge
from analysis.experiments.status import status
from analysis.experiments.store import Reading, Store
from analysis.experiments.study import plan
from analysis.grid import Grid, from_toml
from analysis.schema import SAMPLES
from hooks.tiny import tiny_model

POLICIES = ("snapkv:window=4:kernel=3", "random:recent=3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A model that workers load for themselves."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("llama", vocab_size=500, max_position_embeddings=512).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def grid(model: str, **changes) -> Grid:
    settings = {"models": (model,), "tasks": ("needle",), "lengths": (340, 380), "samples": 5, "max_new_tokens": 4, "judge": 2}
    return Grid(**{**settings, "policies": POLICIES, "budgets": (0.3, 24), **changes})


def rows(path: Path) -> pd.DataFrame:
    return SAMPLES.read(path / "samples.parquet")


def workers() -> list[int]:
    """Processes of Ray's workers, which call themselves by what they run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::Worker"):
                found.append(int(path.parent.name))
        except OSError:  # it has just ended
            continue
    return found


def swept(asked: Grid, out: Path) -> None:
    torch.set_num_threads(1)
    evaluate(asked, out)


def test_killed_at_twenty_moments_it_ends_with_the_rows_of_an_undisturbed_run_and_none_twice(folder, tmp_path):
    asked = grid(folder)
    start = time.monotonic()
    evaluate(asked, tmp_path / "undisturbed")
    took = time.monotonic() - start
    # forked, so that a start costs no imports; each is killed at a moment of its own
    context, moments = multiprocessing.get_context("fork"), random.Random(0)
    kills = counts = 0
    while kills < 20:
        child = context.Process(target=swept, args=(asked, tmp_path / "killed"))
        child.start()
        child.join(moments.uniform(0, 0.25 * took))
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        child.join()
        if (tmp_path / "killed" / "cells.sqlite").is_file():
            with Store(tmp_path / "killed") as run:
                held = len(run.done())
                assert held >= counts  # nothing that was finished is lost
                counts = held
    evaluate(asked, tmp_path / "killed")
    pd.testing.assert_frame_equal(rows(tmp_path / "killed"), rows(tmp_path / "undisturbed"))
    with Reading(tmp_path / "killed") as run:
        assert set(run.tries().values()) == {1}
        assert len(run.done()) == 50
    assert not list((tmp_path / "killed").glob(".*.parquet*"))


class TestRay:
    @pytest.fixture(scope="class", autouse=True)
    def cluster(self):
        ray = pytest.importorskip("ray")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield ray
        ray.shutdown()

    def test_two_workers_give_the_rows_of_one_process_also_after_one_is_killed(self, folder, tmp_path):
        asked = grid(folder)
        evaluate(asked, tmp_path / "local")
        evaluate(asked, tmp_path / "ray", engine=Ray())
        pd.testing.assert_frame_equal(rows(tmp_path / "ray"), rows(tmp_path / "local"))
        killed = []

        def report(done: int, total: int, what: str) -> None:
            if done >= 12 and not killed:
                killed.append(workers()[0])
                os.kill(killed[0], signal.SIGKILL)

        found = evaluate(asked, tmp_path / "lost", engine=Ray(), report=report)
        assert killed
        assert not found.failures
        pd.testing.assert_frame_equal(rows(tmp_path / "lost"), rows(tmp_path / "local"))
        with Reading(tmp_path / "lost") as run:
            assert set(run.tries().values()) == {1}

    def test_a_cell_that_kills_its_workers_is_given_up_and_the_others_are_kept(self, folder, tmp_path):
        path = tmp_path / "deadly.py"
        path.write_text("import os\ndef deadly(seen):\n    os._exit(1)\n")
        sys.path.insert(0, str(tmp_path))
        try:
            import deadly

            from eviction import register, unregister

            carried(deadly)
            register("deadly")(deadly.deadly)
            try:
                asked = grid(folder, policies=("deadly", "random:recent=3"), budgets=(0.3,), lengths=(340,), samples=1)
                found = evaluate(asked, tmp_path / "run", engine=Ray(workers=2))
            finally:
                unregister("deadly")
        finally:
            sys.path.remove(str(tmp_path))
        (reason,) = found.failures.values()
        assert reason.startswith("3 workers were lost on it: ")
        assert set(found.samples["policy"]) == {"full", "random:recent=3"}

    def test_a_model_that_a_worker_cannot_load_fails_its_cells(self, folder, tmp_path):
        groups = plan(grid(folder, samples=1, lengths=(340,)), "nowhere", tokenizer(), 512)
        jobs = [Job(group, frozenset(cell.id for cell in group.cells)) for group in groups]
        found = list(Ray(workers=1).run(grid(folder), jobs, lambda what: None))
        assert len(found) == 5
        assert all("ModelUnavailable" in reason for _, _, reason in found)

    def test_a_worker_of_other_code_computes_nothing(self, folder):
        (group, *_) = plan(grid(folder, samples=1, lengths=(340,)), folder, tokenizer(), 512)
        wanted = [cell.id for cell in group.cells]
        with pytest.raises(InputError, match="a worker has other code"):
            next(Worker(grid(folder), {}, torch.get_num_threads(), "another digest").answer(group, wanted))

    def test_more_than_there_is_is_refused(self, folder, tmp_path):
        with pytest.raises(InputError, match="a worker asks for 3 CPU, and Ray has 2 in all"):
            evaluate(grid(folder), tmp_path / "run", engine=Ray(cpus=3))
        with pytest.raises(InputError, match="a worker asks for 1 GPU, and Ray has 0"):
            evaluate(grid(folder), tmp_path / "run", engine=Ray(gpus=1))


def test_workers_that_are_none_are_refused():
    with pytest.raises(InputError, match="workers=0"):
        Ray(workers=0)


def test_models_are_loaded_one_after_the_other_and_only_where_something_is_lacking(folder, tmp_path, monkeypatch):
    import analysis.experiments.engines as engines

    loads, original = [], engines.load_for
    monkeypatch.setattr(engines, "load_for", lambda asked, model: (loads.append(model), original(asked, model))[1])
    (tmp_path / "other").symlink_to(folder)
    asked = grid(folder, models=(folder, str(tmp_path / "other")), samples=1)
    evaluate(asked, tmp_path / "run")
    assert loads == list(asked.models)
    evaluate(asked, tmp_path / "run")
    assert len(loads) == 2
    evaluate(replace(asked, budgets=(0.3, 24, 0.6), models=asked.models[:1]), tmp_path / "run")
    assert loads == [*asked.models, folder]


class TestDisk:
    def test_a_full_disk_is_told_and_what_was_finished_is_kept(self, folder, tmp_path):
        """A file system of 400 KiB; where none can be mounted, a limit on the size of files."""
        small = tmp_path / "small"
        small.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", small], capture_output=True, check=False)
        script = (
            "import resource, signal, sys, torch\n"
            "torch.set_num_threads(1)\n"
            "from pathlib import Path\n"
            "from analysis.errors import InputError\n"
            "from analysis.experiments.evaluate import evaluate\n"
            "from analysis.grid import Grid\n"
            "if sys.argv[3] == 'limit':\n"
            "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
            "grid = Grid(models=(sys.argv[1],), tasks=('needle',), lengths=(340,), samples=30, max_new_tokens=4, judge=2,\n"
            f"    policies={POLICIES!r}, budgets=(0.3, 24))\n"
            "try:\n"
            "    evaluate(grid, Path(sys.argv[2]))\n"
            "except InputError as error:\n"
            "    print(error)\n"
            "    raise SystemExit(2)\n"
        )
        how = "limit" if mounted.returncode else "mount"
        try:
            ran = subprocess.run(
                [sys.executable, "-c", script, folder, str(small / "run"), how], capture_output=True, text=True, check=False
            )
            assert ran.returncode == 2, ran.stderr
            assert "cannot be written" in ran.stdout
            assert "what was finished is kept" in ran.stdout
            with Reading(small / "run") as run:
                kept = run.rows()
            assert 0 < len(kept) < 150
            assert all(len(row) == len(SAMPLES.columns) for row in kept)
        finally:
            if how == "mount":
                subprocess.run(["umount", small], check=True)

    def test_a_folder_without_permission_is_told(self, folder, tmp_path):
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        # as another user, since root may write anywhere
        for parent in (locked, *locked.parents):
            if parent.owner() == Path("/root").owner() and parent != Path("/") and "pytest" in str(parent):
                parent.chmod(0o755 if parent != locked else 0o555)

        def tried() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)
            try:
                Store(locked / "run")
            except InputError as error:
                os._exit(0 if "cannot be written" in str(error) else 1)
            os._exit(2)

        child = multiprocessing.get_context("fork").Process(target=tried)
        child.start()
        child.join()
        assert child.exitcode == 0

    def test_two_sweeps_on_one_folder(self, folder, tmp_path):
        with Store(tmp_path / "run"), pytest.raises(InputError, match="is in use by another run"):
            evaluate(grid(folder), tmp_path / "run")

    def test_a_truncated_table_is_told_and_made_again(self, folder, tmp_path):
        asked = grid(folder, samples=1, lengths=(340,))
        evaluate(asked, tmp_path / "run")
        path = tmp_path / "run" / "samples.parquet"
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InputError, match=r"samples\.parquet cannot be read"):
            read_run(tmp_path / "run")
        evaluate(asked, tmp_path / "run")  # nothing is computed, and the table is made again
        assert len(read_run(tmp_path / "run")) == 5
        path.unlink()
        with pytest.raises(InputError, match=r"holds no samples\.parquet"):
            read_run(tmp_path / "run")

    def test_tables_that_cannot_be_written_leave_the_rows(self, folder, tmp_path, monkeypatch):
        def full(self, frame, path, about):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        asked = grid(folder, samples=1, lengths=(340,))
        with monkeypatch.context() as patch:
            patch.setattr(type(SAMPLES), "write", full)
            with pytest.raises(InputError, match=r"cannot be written to .*No space left on device; the rows are kept"):
                evaluate(asked, tmp_path / "run")
        with Reading(tmp_path / "run") as run:
            assert len(run.done()) == 5


class TestStatus:
    def test_it_tells_how_far_a_run_is_from_outside(self, folder, tmp_path):
        asked, seen = grid(folder), []

        def report(done: int, total: int, what: str) -> None:
            if done in (0, 20):
                seen.append(status(tmp_path / "run"))

        evaluate(asked, tmp_path / "run", report=report)
        assert [one.running for one in seen] == [True] * len(seen)
        assert (seen[-1].done, seen[-1].total) == (20, 50)
        assert 0 < seen[-1].seconds_left < 600
        assert seen[-1].what.startswith("needle, ")
        end = status(tmp_path / "run")
        assert (end.done, end.total, end.running, end.failures, end.seconds_left) == (50, 50, False, {}, None)
        ran = CliRunner().invoke(app, ["status", str(tmp_path / "run")])
        assert "50 of 50 cells (100%)" in ran.output
        assert "finished" in ran.output
        told = json.loads(CliRunner().invoke(app, ["status", str(tmp_path / "run"), "--json"]).output)
        assert told["settings"]["policies"] == list(POLICIES)
        with Store(tmp_path / "run") as run:
            run.note("asked", {"total": 60, "cells": [*run.done(), *"abcdefghij"]})
            run.fail("a", "RuntimeError: no")
        halted = CliRunner().invoke(app, ["status", str(tmp_path / "run"), "--watch"]).output
        assert "50 of 60 cells (83%), 1 failed" in halted
        assert "stopped, last row" in halted
        assert "1 × RuntimeError: no" in halted

    def test_a_folder_that_holds_none(self, tmp_path):
        with pytest.raises(InputError, match="holds no run"):
            status(tmp_path)
        (tmp_path / "cells.sqlite").write_bytes(b"SQLite format 3\0 and no more")
        with pytest.raises(InputError, match="cannot be read"):
            status(tmp_path)


class TestCompare:
    def test_differences_are_paired_and_have_intervals(self):
        first = samples(lambda policy, budget, sample: sample / 20)
        second = samples(lambda policy, budget, sample: sample / 20 + (0.1 if policy == "fisher" else 0))
        found = compared(first, second).set_index(["policy", "budget", "measure"])
        assert found.loc[("snapkv", 0.2, "score"), ["difference", "low", "high", "p"]].tolist() == [0, 0, 0, 1]
        row = found.loc[("fisher", 0.4, "score")]
        assert row["difference"] == pytest.approx(0.1)
        assert row["low"] == pytest.approx(0.1)  # the spread between samples is not the spread of the difference
        assert row["pairs"] == 10
        assert row["p"] <= row["p_adjusted"]

    def test_models_are_paired_across_where_the_runs_share_none(self):
        first = samples(lambda policy, budget, sample: 1.0)
        other = samples(lambda policy, budget, sample: 0.0).assign(model="another")
        found = compared(first, other)
        assert (found.loc[found["measure"] == "score", "difference"] == -1).all()
        with pytest.raises(InputError, match="the second run has several models"):
            compared(first, pd.concat([other, other.assign(model="a third")]))

    def test_runs_that_cannot_be_compared(self):
        first = samples(lambda policy, budget, sample: 1.0)
        with pytest.raises(InputError, match="share no sample, policy and budget"):
            compared(first, first.assign(seed=1))
        with pytest.raises(InputError, match="50 of 50 samples of the same name have other answers"):
            compared(first, first.assign(answer="b"))

    def test_the_command_prints_a_table(self, folder, tmp_path):
        for name, judge in (("one", 2), ("two", 1)):
            evaluate(grid(folder, samples=2, lengths=(340,), judge=judge), tmp_path / name)
        ran = CliRunner().invoke(app, ["compare", str(tmp_path / "one"), str(tmp_path / "two")])
        assert ran.exit_code == 0, ran.output
        assert "24" in ran.output
        listed = json.loads(CliRunner().invoke(app, ["compare", str(tmp_path / "one"), str(tmp_path / "two"), "--json"]).output)
        assert {row["measure"] for row in listed} == {"score", "kl", "agreement", "perturbation", "bytes"}
        wrong = CliRunner().invoke(app, ["compare", str(tmp_path / "one"), str(tmp_path / "two"), "--measure", "speed"])
        assert "--measure is one of score" in str(wrong.exception)


def test_merged_runs_are_the_run_of_all(folder, tmp_path):
    evaluate(grid(folder, lengths=(340,), samples=2), tmp_path / "a")
    evaluate(grid(folder, lengths=(380,), samples=2), tmp_path / "b")
    evaluate(grid(folder, samples=2), tmp_path / "whole")
    merged = merge([tmp_path / "a", tmp_path / "b", tmp_path / "a"], tmp_path / "all")
    expected = rows(tmp_path / "whole")
    pd.testing.assert_frame_equal(rows(tmp_path / "all"), merged)
    order = ["length", "sample", "policy", "budget"]
    pd.testing.assert_frame_equal(merged.sort_values(order, ignore_index=True), expected.sort_values(order, ignore_index=True))
    again = evaluate(grid(folder, samples=2), tmp_path / "all")
    assert len(again.samples) == 20
    with Reading(tmp_path / "all") as run:
        assert set(run.tries().values()) == {1}
    asked = ["merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "told")]
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert told["rows"] == len(pd.read_parquet(told["samples"])) == 20
    evaluate(grid(folder, lengths=(340,), samples=2, judge=1), tmp_path / "c")
    with pytest.raises(InputError, match="10 rows have the same setting as another, of other code or data"):
        merge([tmp_path / "a", tmp_path / "c"], tmp_path / "none")
    with pytest.raises(InputError, match="holds no run"):
        merge([tmp_path], tmp_path / "none")


class TestToml:
    def test_a_file_declares_the_grid_and_options_take_its_place(self, tmp_path):
        path = tmp_path / "grid.toml"
        path.write_text(
            'tasks = ["vt"]\nlengths = [512]\npolicies = ["snapkv"]\nbudgets = [0.2, 64]\nsamples = 3\naware = true\nhaystack = "a.txt"\n'
        )
        assert from_toml(path, samples=4, seeds=None) == Grid(
            tasks=("vt",),
            lengths=(512,),
            policies=("snapkv",),
            budgets=(0.2, 64),
            samples=4,
            aware=True,
            haystack=Path("a.txt"),
        )

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("taks = ['vt']", "there is no setting 'taks'; did you mean tasks"),
            ("tasks = 'vt'", "tasks is a list, such as"),
            ("tasks = [3]", "tasks is made of text, not 3"),
            ("lengths = ['1k']", "lengths is made of whole numbers, not '1k'"),
            ("aware = 'yes'", "aware is made of true or false, not 'yes'"),
            ("samples = 'ten'", "samples is made of whole numbers, not 'ten'"),
            ("data = 3", "data is made of text, not 3"),
            ("tasks = [", "is no TOML"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path, text, message):
        path = tmp_path / "grid.toml"
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            from_toml(path)
        with pytest.raises(InputError, match="cannot be read: No such file"):
            from_toml(tmp_path / "none.toml")

    def test_the_command_sweeps_it(self, folder, tmp_path):
        path = tmp_path / "grid.toml"
        path.write_text(
            f'models = ["{folder}"]\ntasks = ["needle"]\nlengths = [340]\npolicies = ["random"]\nbudgets = [0.3]\nsamples = 1\n'
        )
        ran = CliRunner().invoke(app, ["sweep", str(path), "--max-new-tokens", "3", "--out", str(tmp_path / "run")])
        assert ran.exit_code == 0, ran.output
        assert len(rows(tmp_path / "run")) == 2
        wrong = CliRunner().invoke(app, ["sweep", str(path), "--engine", "dask"])
        assert "--engine is one of local, ray" in str(wrong.exception)
