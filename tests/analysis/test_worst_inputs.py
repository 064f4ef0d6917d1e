"""The worst inputs: a clear line, exit code 2, no traceback, nothing half-written. One table for all commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.cli import app as cli

HUGE = str(10**30)

# command line, and what its message must say; files are those of `place`
WORST = [
    # what is no command or option
    ("validdate", "No such command 'validdate'. Did you mean 'validate'"),
    ("validate --buget 0.1", "No such option: --buget"),
    ("validate good.txt", "unexpected extra argument"),
    ("explain", "Missing argument"),
    ("validate --window", "requires an argument"),
    # wrong types
    ("validate --window many", "--window': Input should be a valid integer"),
    ("validate --alpha half", "--alpha': Input should be a valid number"),
    ("validate --passages 1.5", "--passages': Input should be a valid integer"),
    ("validate --budgets a,b", "--budgets takes numbers"),
    ("evaluate --budgets 0.2,x", "--budgets"),
    ("evaluate --context-length long", "--context-length"),
    ("evaluate --seed x", "--seed"),
    ("evaluate --samples 1e3", "--samples': Input should be a valid integer"),
    ("sweep --gpus all", "--gpus': Input should be a valid number"),
    # numbers out of range
    ("validate --budgets 0", "a budget is a share of the cache in (0, 1], not 0"),
    ("validate --budgets 1.2", "a budget is a share of the cache in (0, 1], not 1.2"),
    ("validate --budgets -0.1", "a budget is a share of the cache in (0, 1], not -0.1"),
    ("validate --budgets nan", "a budget is a share of the cache in (0, 1], not nan"),
    ("validate --budgets inf", "a budget is a share of the cache in (0, 1], not inf"),
    ("validate --budgets ,", "budgets"),
    ("validate --budgets 0.1,0.1", "budgets"),
    ("validate --alpha 1.5", "alpha"),
    ("validate --alpha nan", "alpha"),
    ("validate --epsilon -1", "epsilon"),
    ("validate --epsilon inf", "epsilon"),
    ("validate --window 0", "window"),
    ("validate --window -3", "window"),
    (f"validate --window {HUGE}", "window"),
    ("validate --context-length 0", "context-length"),
    ("validate --context-length 8", "window"),
    ("validate --kernel 0", "kernel"),
    ("validate --kernel 4", "kernel"),
    ("validate --later 0", "later"),
    ("validate --passages 0", "passages"),
    ("validate --passages 100000", "passages"),
    ("validate --leave-one-out -1", "leave-one-out"),
    ("validate --seed -1", "seed"),
    ("evaluate --budgets 0", "a budget is a share"),
    ("evaluate --budgets 1.5", "a budget is a share"),
    ("evaluate --samples 0", "samples"),
    ("evaluate --context-length 0", "--context-length must be"),
    ("evaluate --max-new-tokens 0", "max-new-tokens"),
    ("evaluate --judge -1", "judge"),
    ("evaluate --depths 0", "depths"),
    ("sweep --engine ray --workers 0", "workers"),
    ("sweep --engine ray --memory -1", "memory"),
    ("ablate budget --budget 0.1", "leave --budget out"),
    ("ablate alpha --budget 2", "a budget is a share"),
    ("leave-one-out --every 0", "--every must be at least 1"),
    ("leave-one-out --signs 0", "--signs must be at least 1"),
    ("leave-one-out --context-length 1", "--context-length must be at least 3"),
    ("head-scores --contexts 0", "--contexts must be at least 1"),
    ("head-scores --context-length -5", "context-length"),
    ("generate x --budget 0", "--budget is a number of entries"),
    ("generate x --budget 2.5", "--budget is a number of entries"),
    ("generate x --chunk 0", "--chunk must be at least 1"),
    ("generate x --every -1", "every must be a whole number"),
    ("generate x --temperature nan", "--temperature must be a finite number"),
    ("generate x --max-new-tokens 0", "--max-new-tokens must be at least 1"),
    # unknown names, with what is near
    ("validate --pooling average", "pooling"),
    ("validate --dtype float12", "dtype"),
    ("validate --device gpu", "device"),
    ("validate --device cuda:99", "cuda"),
    ("explain snapkw", "did you mean snapkv"),
    ("explain snapkv+twostage", "snapkv+two-stage"),
    ("models lama", "did you mean llama"),
    ("ablate alhpa", "alpha"),
    ("evaluate --task niah_singel_1", "niah_single_1"),
    ("evaluate --policies adakvv", "adakv"),
    ("evaluate --policies snapkv:windows=3", "windows"),
    ("evaluate --policies snapkv:window", "window"),
    ("evaluate --metric f2 --task rows.jsonl", "metric"),
    ("sweep --engine slurm", "--engine is one of local, ray"),
    ("head-scores --measure attention", "--measure is one of headkv, copy"),
    ("compare a b --measure speed", "--measure is one of score"),
    ("generate x --policy headkv", "headkv needs scores"),
    ("generate x --set window=0", "window"),
    ("generate x --set window", "--set takes a parameter and its value"),
    # files that are not there, or are not what they should be
    ("validate --context nowhere.txt", "nowhere.txt"),
    ("validate --context empty.txt", "empty.txt"),
    ("validate --context latin1.txt", "latin1.txt"),
    ("validate --context binary.bin", "binary.bin"),
    ("validate --context folder", "folder"),
    ("validate --context short.txt", "short.txt"),
    ("validate --context good.txt --context good.txt", "names the same file twice"),
    ("validate --model nowhere/at-all", "nowhere/at-all"),
    ("validate --model weightless", "weightless"),
    ("validate --model damaged", "damaged"),
    ("validate --model folder", "folder"),
    ("validate --model good.txt", "good.txt"),
    ("validate --model ''", "model"),
    ("validate --answers nowhere", "nowhere"),
    ("validate --answers folder", "folder"),
    ("validate --out good.txt", "good.txt"),
    ("validate --out folder", "folder"),
    ("validate --out /sys/run", "/sys/run"),
    ("evaluate --out good.txt", "good.txt"),
    ("evaluate --task nowhere.jsonl", "nowhere.jsonl"),
    ("evaluate --task rows.jsonl", "rows.jsonl"),
    ("evaluate --task nojson.jsonl", "nojson.jsonl"),
    ("evaluate --task empty.jsonl", "empty.jsonl"),
    ("evaluate --task ,", "--task"),
    ("evaluate --task needle --haystack nowhere.txt", "nowhere.txt"),
    ("evaluate --task needle --haystack latin1.txt", "latin1.txt"),
    ("evaluate --task qa_1", "--data"),
    ("evaluate --import nowhere.py", "there is no such file"),
    ("evaluate --import raises.py", "raises.py raised ZeroDivisionError"),
    ("evaluate --model weightless", "weightless"),
    ("sweep nowhere.toml", "nowhere.toml"),
    ("sweep latin1.txt", "latin1.txt"),
    ("sweep broken.toml", "broken.toml"),
    ("sweep unknown.toml", "did you mean policies"),
    ("sweep wrong.toml", "samples"),
    ("sweep --policies ''", "--policies"),
    ("report nowhere", "nowhere holds no run.json"),
    ("report folder", "folder holds no run.json"),
    ("report halfrun", "halfrun"),
    ("status nowhere", "nowhere"),
    ("status folder", "folder"),
    ("compare nowhere folder", "nowhere"),
    ("merge nowhere --out all", "nowhere"),
    ("merge folder --out folder", "folder"),
    ("leave-one-out --context latin1.txt", "latin1.txt"),
    ("leave-one-out --context empty.txt", "empty.txt"),
    ("leave-one-out --out nowhere/x.parquet", "there is no folder nowhere"),
    ("leave-one-out --model weightless", "weightless"),
    ("head-scores --out nowhere/x.json", "there is no folder nowhere"),
    ("head-scores --model weightless", "weightless"),
    ("generate ''", "the prompt is empty"),
    ("generate x --context latin1.txt", "latin1.txt"),
    ("generate x --context folder", "folder"),
    ("generate x --model weightless", "weightless"),
    ("generate x --policy headkv --set scores=nowhere.json", "nowhere.json"),
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "good.txt").write_text("The river runs through the valley. " * 200)
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin1.txt").write_bytes("Straße, naïve, señor. ".encode("latin-1") * 50)
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "something.txt").write_text("of mine")
    (tmp_path / "weightless").mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_attention_heads": 4}
    (tmp_path / "weightless" / "config.json").write_text(json.dumps(config))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "rows.jsonl").write_text('{"context": "a", "question": "b"}\n')
    (tmp_path / "nojson.jsonl").write_text("no JSON\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "broken.toml").write_text("tasks = [")
    (tmp_path / "unknown.toml").write_text('polices = ["snapkv"]\n')
    (tmp_path / "wrong.toml").write_text('samples = "many"\n')
    (tmp_path / "halfrun").mkdir()
    (tmp_path / "halfrun" / "run.json").write_text('{"model": ')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def words(line: str) -> list[str]:
    return ["" if word == "''" else word for word in line.split(" ")]


@pytest.mark.parametrize(("line", "message"), WORST, ids=[line for line, _ in WORST])
def test_a_bad_input_is_one_clear_message_and_leaves_nothing(line, message, place, monkeypatch, capsys):
    before = files(place), sorted(path.name for path in place.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["criticalkv", *words(line)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr()
    plain = " ".join(said.err.replace("│", " ").split())
    assert message in plain, said.err
    assert stopped.value.code == 2
    assert "Traceback" not in said.err + said.out
    assert said.out == ""
    assert len(plain) < 1500
    assert (files(place), sorted(path.name for path in place.rglob("*"))) == before


def test_there_are_at_least_fifty():
    assert len(WORST) >= 50
    assert len({line for line, _ in WORST}) == len(WORST)


def test_a_closed_pipe_ends_without_a_word():
    with subprocess.Popen(
        [Path(sys.executable).with_name("criticalkv"), "policies", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read().decode()
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert process.returncode != 0


def test_what_is_asked_of_standard_input_may_be_empty(place, monkeypatch, capsys):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(sys, "argv", ["criticalkv", "generate", "-"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "the prompt is empty" in capsys.readouterr().err
