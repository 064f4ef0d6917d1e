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
    ("evaluate --budgets 0.2,x", "--budgets takes numbers separated by commas, such as 0.1,0.2 or"),
    ("evaluate --context-length long", "--context-length takes whole numbers separated by commas, such as"),
    ("evaluate --seed x", "--seed takes whole numbers separated by commas, such as 1024,2048; not"),
    ("evaluate --samples 1e3", "--samples': Input should be a valid integer"),
    ("sweep --gpus all", "--gpus': Input should be a valid number"),
    # numbers out of range
    ("validate --budgets 0", "a budget is a share of the cache in (0, 1], not 0"),
    ("validate --budgets 1.2", "a budget is a share of the cache in (0, 1], not 1.2"),
    ("validate --budgets -0.1", "a budget is a share of the cache in (0, 1], not -0.1"),
    ("validate --budgets nan", "a budget is a share of the cache in (0, 1], not nan"),
    ("validate --budgets inf", "a budget is a share of the cache in (0, 1], not inf"),
    ("validate --budgets ,", "--budgets needs at least one share of the cache, such as 0.2"),
    ("validate --budgets 0.1,0.1", "--budgets names a budget twice: 0.1, 0.1"),
    ("validate --alpha 1.5", "--alpha lies in [0, 1], not at 1.5"),
    ("validate --alpha nan", "--alpha lies in [0, 1], not at nan"),
    ("validate --epsilon -1", "--epsilon must be a finite number of at least 0, not -1"),
    ("validate --epsilon inf", "--epsilon must be a finite number of at least 0, not inf"),
    ("validate --window 0", "--window must be at least 1, not 0"),
    ("validate --window -3", "--window must be at least 1, not -3"),
    (f"validate --window {HUGE}", "window"),
    ("validate --context-length 0", "--context-length must be at least 1, not 0"),
    ("validate --context-length 8", "pydoc:exceptions has 8 tokens, which is no more than the window of 32"),
    ("validate --kernel 0", "--kernel must be at least 1, not 0"),
    ("validate --kernel 4", "--kernel must be odd, so that it has a middle; not 4"),
    ("validate --later 0", "--later must be at least 1, not 0"),
    ("validate --passages 0", "--passages must be at least 1, not 0"),
    ("validate --passages 100000", "--passages is at most 79, the topics of Python's documentation; not"),
    ("validate --leave-one-out -1", "--leave-one-out is 0 (none) or at least 2 tokens, not -1"),
    ("validate --seed -1", "--seed must be a whole number from 0 to 2³² − 1, not -1"),
    ("evaluate --budgets 0", "a budget is a share"),
    ("evaluate --budgets 1.5", "a budget is a share"),
    ("evaluate --samples 0", "--samples must be a whole number of at least 1, not 0"),
    ("evaluate --context-length 0", "--context-length must be"),
    ("evaluate --max-new-tokens 0", "--max-new-tokens must be a whole number of at least 1, not 0"),
    ("evaluate --judge -1", "--judge must be a whole number of at least 0, not -1"),
    ("evaluate --depths 0", "--depths must be a whole number of at least 1, not 0"),
    ("sweep --engine ray --workers 0", "a worker has at least 1 CPU and there is at least 1; not workers=0"),
    ("sweep --engine ray --memory -1", "a worker has at least 1 CPU and there is at least 1; not workers=2"),
    ("sweep --engine ray --gpus 1", "give --device cuda too"),
    (f"validate --seed {HUGE}", "--seed must be a whole number from 0"),
    (f"generate x --seed {2**64}", "--seed must be a whole number from 0"),
    ("ablate budget --budget 0.1", "leave --budget out"),
    ("ablate alpha --budget 2", "a budget is a share"),
    ("leave-one-out --every 0", "--every must be at least 1"),
    ("leave-one-out --signs 0", "--signs must be at least 1"),
    ("leave-one-out --context-length 1", "--context-length must be at least 3"),
    ("head-scores --contexts 0", "--contexts must be at least 1"),
    ("head-scores --context-length -5", "--context-length must be at least 1, not -5"),
    ("generate x --budget 0", "--budget is a number of entries"),
    ("generate x --budget 2.5", "--budget is a number of entries"),
    ("generate x --chunk 0", "--chunk must be at least 1"),
    ("generate x --every -1", "every must be a whole number"),
    ("generate x --temperature nan", "--temperature must be a finite number"),
    ("generate x --max-new-tokens 0", "--max-new-tokens must be at least 1"),
    # unknown names, with what is near
    ("validate --pooling average", "--pooling is one of max, mean, none, not 'average'"),
    ("validate --dtype float12", "--dtype is one of float32, float64, bfloat16, float16, not 'float12'"),
    ("validate --device gpu", "--device gpu is not available: Expected one of cpu, cuda, ipu, xpu"),
    ("validate --device cuda:99", "--device cuda:99 is not available"),
    ("explain snapkw", "no policy is called 'snapkw'; did you mean snapkv or snapkv+norm or"),
    ("explain snapkv+twostage", "no policy is called 'snapkv+twostage'; did you mean snapkv+two-stage or"),
    ("models lama", "no family 'lama' in this transformers; did you mean llama, mllama"),
    ("ablate alhpa", "no ablation is called 'alhpa'; did you mean alpha?"),
    ("evaluate --task niah_singel_1", "no task is called 'niah_singel_1'; did you mean niah_single_1 or"),
    ("evaluate --policies adakvv", "--policies adakvv: no policy is called 'adakvv'; did you mean adakv or"),
    ("evaluate --policies snapkv:windows=3", "--policies snapkv:windows=3: snapkv has no parameter windows; it has"),
    ("evaluate --policies snapkv:window", "'snapkv:window': a policy's parameters are written as"),
    ("evaluate --metric f2 --task rows.jsonl", "no metric is called 'f2'; there are all, part, exact, f1, rouge-l"),
    ("sweep --engine slurm", "--engine is one of local, ray"),
    ("head-scores --measure attention", "--measure is one of headkv, copy"),
    ("compare a b --measure speed", "--measure is one of score"),
    ("generate x --policy headkv", "headkv needs scores"),
    ("generate x --set window=0", "window must be a whole number of at least 1, not 0"),
    ("generate x --set window", "--set takes a parameter and its value"),
    # files that are not there, or are not what they should be
    ("validate --context nowhere.txt", "--context nowhere.txt cannot be read: No such file or directory"),
    ("validate --context empty.txt", "empty.txt has 0 tokens, which is no more than the window of 32: give a"),
    ("validate --context latin1.txt", "--context latin1.txt is not text in UTF-8 (byte 4 is not)"),
    ("validate --context binary.bin", "--context binary.bin is not text in UTF-8 (byte 128 is not)"),
    ("validate --context folder", "--context folder is a folder; name the files in it"),
    ("validate --context short.txt", "short.txt has 3 tokens, which is no more than the window of 32: give a"),
    ("validate --context good.txt --context good.txt", "names the same file twice"),
    ("validate --model nowhere/at-all", "cannot load the model 'nowhere/at-all': "),
    ("validate --model weightless", "cannot load the model 'weightless': the folder holds no weights"),
    ("validate --model damaged", "cannot load the model 'damaged': the folder holds no weights"),
    ("validate --model folder", "cannot load the model 'folder': the folder holds no config.json"),
    ("validate --model good.txt", "cannot load the model 'good.txt': It looks like the config file at"),
    ("validate --model ''", "cannot load the model '': Repo id must use alphanumeric chars, '-', '_'"),
    ("validate --answers nowhere", "nowhere holds no samples.parquet; give the folder of an evaluation or a"),
    ("validate --answers folder", "folder holds no samples.parquet; give the folder of an evaluation or a"),
    ("validate --out good.txt", "--out good.txt is a file; name a folder"),
    ("validate --out folder", "--out folder is not empty (it holds something.txt); name a new folder"),
    ("validate --out /sys/run", "--out /sys/run cannot be written: Operation not permitted"),
    ("evaluate --out good.txt", "--out good.txt is a file; name a folder"),
    ("evaluate --task nowhere.jsonl", "there is no file nowhere.jsonl"),
    ("evaluate --task rows.jsonl", "rows.jsonl has no column answer_prefix, answer, task, max_new_tokens; a"),
    ("evaluate --task nojson.jsonl", "nojson.jsonl cannot be read: An error occurred while generating the"),
    ("evaluate --task empty.jsonl", "empty.jsonl is empty"),
    ("evaluate --task ,", "--task names nothing"),
    ("evaluate --task needle --haystack nowhere.txt", "--haystack nowhere.txt cannot be read"),
    ("evaluate --task needle --haystack latin1.txt", "--haystack latin1.txt is not text in UTF-8"),
    ("evaluate --task qa_1", "qa_1 reads a data set, which is not made here: name one, such as --data"),
    ("evaluate --import nowhere.py", "there is no such file"),
    ("evaluate --import raises.py", "raises.py raised ZeroDivisionError"),
    ("evaluate --model weightless", "cannot load the model 'weightless': the folder holds no weights"),
    ("sweep nowhere.toml", "nowhere.toml cannot be read: No such file or directory"),
    ("sweep latin1.txt", "latin1.txt cannot be read: 'utf-8' codec can't decode byte 0xdf in"),
    ("sweep broken.toml", "broken.toml is no TOML: Invalid value (at end of document)"),
    ("sweep unknown.toml", "unknown.toml: there is no setting 'polices'; did you mean policies or"),
    ("sweep wrong.toml", "wrong.toml: samples is made of whole numbers, not 'many'"),
    ("sweep --policies ''", "--policies names nothing"),
    ("report nowhere", "nowhere holds no run.json"),
    ("report folder", "folder holds no run.json"),
    ("report halfrun", "halfrun/run.json cannot be read: Expecting value: line 1 column 11"),
    ("status nowhere", "nowhere holds no run: it has no cells.sqlite"),
    ("status folder", "folder holds no run: it has no cells.sqlite"),
    ("compare nowhere folder", "nowhere holds no samples.parquet; give the folder of an evaluation or a"),
    ("merge nowhere --out all", "nowhere holds no run: it has no cells.sqlite"),
    ("merge folder --out folder", "folder holds no run: it has no cells.sqlite"),
    ("leave-one-out --context latin1.txt", "--context latin1.txt is not text in UTF-8 (byte 4 is not)"),
    ("leave-one-out --context empty.txt", "empty.txt has 0 tokens, which is no more than the window of 1: give a"),
    ("leave-one-out --out nowhere/x.parquet", "there is no folder nowhere"),
    ("leave-one-out --model weightless", "cannot load the model 'weightless': the folder holds no weights"),
    ("head-scores --out nowhere/x.json", "there is no folder nowhere"),
    ("head-scores --model weightless", "cannot load the model 'weightless': the folder holds no weights"),
    ("generate ''", "the prompt is empty"),
    ("generate x --context latin1.txt", "--context latin1.txt is not text in UTF-8"),
    ("generate x --context folder", "--context folder is a folder"),
    ("generate x --model weightless", "cannot load the model 'weightless': the folder holds no weights"),
    ("generate x --policy headkv --set scores=nowhere.json", "[Errno 2] No such file or directory: 'nowhere.json'"),
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
