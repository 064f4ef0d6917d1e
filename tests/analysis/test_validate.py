"""`criticalkv validate`: the rows it writes are true, the same each time, and a mistake writes nothing."""

import copy
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import worlds
from models import tiny
from transformers.cache_utils import DynamicCache
from typer.testing import CliRunner

import analysis.experiments.run as run_module
from analysis.ablations import ABLATIONS
from analysis.cli import app as cli
from analysis.errors import InputError
from analysis.experiments.choices import choices
from analysis.experiments.contexts import Context, texts, tokenised
from analysis.experiments.run import validate
from analysis.experiments.selfcheck import SelfCheckFailed
from analysis.experiments.validation import validate_context
from analysis.grid import split_policy
from analysis.schema import CLAIMS, POLICIES, SAMPLES, TABLES
from analysis.settings import ValidationSettings
from eviction import prefill
from eviction.looked import look
from hooks import LoadedModel, UnsupportedAttention, capture, hiding
from hooks.forward import forward, greedy
from perturbation import attention_weights, perturbation

PAIR = {"model": "tiny", "window": 4, "ablations": (), "leave_one_out": 0, "others": False}
"""The compared pair alone."""
SETTINGS = ValidationSettings(**PAIR, passages=2, context_length=48, kernel=3, budgets=(0.2, 0.5), later=5)

EVERYTHING = ValidationSettings(
    model="tiny", passages=2, context_length=120, window=4, kernel=3, budgets=(0.1, 0.2, 0.5), later=5, leave_one_out=24
)


class Letters:
    """A tokenizer for the tiny models: a token per character."""

    def __call__(self, text, **_):
        ids = [3 + ord(letter) % 90 for letter in text]
        return type("Encoding", (), {"input_ids": torch.tensor([ids], dtype=torch.long)})

    def decode(self, ids):
        return "".join(chr(32 + one) for one in ids)


def loaded(family="llama", **settings):
    return LoadedModel(tiny(family, **settings), Letters(), "tiny", "random")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return validate(SETTINGS, tmp_path_factory.mktemp("run"), loaded=loaded())


def test_a_run_writes_tables_figures_and_report(finished):
    files = {path.relative_to(finished.folder).as_posix() for path in finished.folder.rglob("*") if path.is_file()}
    names = (
        "head_map",
        "layer_perturbation",
        "win_rate",
        "bound_tightness",
        "retained_mass",
        "drift",
        "budget_curve",
        "kl_by_budget",
    )
    assert files == {
        *(table.file for table in (*TABLES, CLAIMS)), "run.json", "report.html", "report.md",
        *(f"figures/{name}.{kind}" for name in names for kind in ("png", "svg")),
    }  # fmt: skip
    for table in (*TABLES, CLAIMS):
        pd.testing.assert_frame_equal(table.read(finished.folder / table.file), finished.tables[table.name])


def test_every_key_has_its_row_and_the_bound_holds_in_all(finished):
    # contexts · layers · heads · policies · budgets · query sets · norms
    assert len(finished.heads) == 2 * 3 * 4 * 2 * 2 * 3 * 2
    assert len(finished.layers) == 2 * 3 * 2 * 2 * 3 * 2
    assert len(finished.runs) == 2 * (1 + 2 * 2)
    assert (finished.heads["violations"] == 0).all()
    assert (finished.heads["perturbation"] <= finished.heads["theta"]).all()
    assert (finished.heads["kv_head"] == finished.heads["head"] // 2).all()
    staged = finished.heads["policy"] == "snapkv+two-stage"
    assert (finished.heads["stage1_mass"].notna() == staged).all()
    assert (finished.heads["stage1_mass"][staged] <= finished.heads["retained_mass"][staged] + 1e-6).all()
    assert (finished.layers["drift"].isna() == (finished.layers["queries"] == "window")).all()


def test_rows_are_the_same_when_the_run_is_repeated(finished, tmp_path):
    again = validate(SETTINGS, tmp_path / "again", loaded=loaded())
    for table in (*TABLES, CLAIMS):
        pd.testing.assert_frame_equal(again.tables[table.name], finished.tables[table.name], check_exact=True)


def test_another_seed_measures_other_text(finished, tmp_path):
    other = [text.name for text in texts(ValidationSettings(seed=1))]
    assert other != [text.name for text in texts(ValidationSettings(seed=0))]
    assert [text.name for text in texts(ValidationSettings(seed=1))] == other


@torch.no_grad()
def test_a_row_is_what_the_rooms_say_done_by_hand(finished):
    """One head, one policy, one budget, all three query sets, recomputed step by step from prefill and masked truth."""
    model = loaded().model
    tokens = tokenised(texts(SETTINGS)[0], Letters(), SETTINGS, None).tokens
    policy = choices(SETTINGS).policies["snapkv+two-stage"]
    prefilled = prefill(model, tokens, policy, 0.5)
    cache = DynamicCache(config=model.config)
    with capture(model, window=4) as window:
        logits = forward(model, tokens, cache, last_logits=1)
    decoded = greedy(model, logits.argmax(-1), cache, 6)
    whole = DynamicCache(config=model.config)
    forward(model, tokens, whole)
    with capture(model, window=None) as after:
        forward(model, decoded, whole)
    rows = finished.heads.set_index(["context", "layer", "head", "policy", "budget", "queries", "norm"])["perturbation"]
    name = texts(SETTINGS)[0].name
    for layer in range(3):
        keep = prefilled.decisions[layer].keep
        for record, sets in (
            (window[layer], {"window": slice(0, 4)}),
            (after[layer], {"first": slice(0, 1), "later": slice(1, 6)}),
        ):
            longer = torch.cat([keep, keep.new_ones(1, 2, record.n_keys - keep.shape[2])], -1)
            weights, _ = attention_weights(**record.inputs)
            truth = perturbation(weights, record.values, record.projection_blocks, longer, norm=2)[0, 3]
            for queries, part in sets.items():
                row = rows[name, layer, 3, "snapkv+two-stage", 0.5, queries, "L2"]
                assert row == pytest.approx(float(truth[part].mean()), rel=1e-5)


@torch.no_grad()
def test_kl_and_drift_are_those_of_decoding_on_the_evicted_cache(finished):
    model = loaded().model
    tokens = tokenised(texts(SETTINGS)[1], Letters(), SETTINGS, None).tokens
    prefilled = prefill(model, tokens, choices(SETTINGS).policies["snapkv"], 0.2)
    decoded = [prefilled.logits.argmax(-1)]
    for _ in range(5):
        decoded.append(model(torch.cat([tokens, *decoded], 1)).logits[:, -1:].argmax(-1))
    full = model(torch.cat([tokens, *decoded], 1), output_hidden_states=True)
    with capture(model, window=None) as evicted:
        logits = forward(model, torch.cat(decoded, 1), prefilled.cache)
    log_full, log_evicted = full.logits[0, -6:-1].double().log_softmax(-1), logits[0, :5].double().log_softmax(-1)
    kl = float((log_full.exp() * (log_full - log_evicted)).sum(-1).mean())
    name = texts(SETTINGS)[1].name
    runs = finished.runs.set_index(["context", "policy", "budget"])
    assert runs.loc[(name, "snapkv", 0.2), "kl"] == pytest.approx(kl, rel=1e-4)
    assert runs.loc[(name, "snapkv", 0.2), "entries_kept"] == 10
    hidden = full.hidden_states[2][0, -6]  # after layer 1, the first decoded token
    change = (evicted[1].hidden_after[0, 0] - hidden).abs().sum() / hidden.abs().sum()
    layers = finished.layers.set_index(["context", "layer", "policy", "budget", "queries", "norm"])
    assert layers.loc[(name, 1, "snapkv", 0.2, "first", "L1"), "drift"] == pytest.approx(float(change), rel=1e-4)


def test_a_budget_of_everything_perturbs_nothing(tmp_path):
    settings = ValidationSettings(**PAIR, passages=1, context_length=40, budgets=(1.0,), later=3)
    done = validate(settings, tmp_path / "run", loaded=loaded())
    assert (done.heads["perturbation"] == 0).all()
    assert (done.heads["theta"] == 0).all()
    assert (done.runs["kl"].abs() < 1e-9).all()
    assert done.layers["coupling"].isna().all()
    assert done.report.exists()


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_other_families_run_too(family, tmp_path):
    done = validate(SETTINGS, tmp_path / "run", loaded=loaded(family))
    assert (done.heads["violations"] == 0).all()


LETTERS = Context("letters", Letters()("the quick brown fox jumps over it; " * 4).input_ids[:, :120])
LACKING = {
    "linear": "the last tokens cannot be run again",
    "sliding": "does not cache the whole prompt",
    "gate": "where attention is gated",
}


@pytest.mark.parametrize(
    ("family", "settings", "refused"),
    [
        ("gpt2", {}, {}),
        ("laguna", {}, {"least L found": "gate"}),  # its output gate
        ("deepseek_v3", {}, {}),  # one latent for all heads
        ("mistral", {"sliding_window": 8}, {"entries": "sliding"}),
        ("gemma3_text", {"sliding_window": 8}, {"entries": "sliding"}),  # sliding and full layers: as many entries as each has
        ("gpt_oss", {"attention": "eager", "sliding_window": 8}, {"entries": "sliding"}),  # and sinks
        ("jamba", {}, {"fisher": "linear", "entries": "sliding"}),
    ],
)
def test_other_kinds_of_attention_are_measured_whole(family, settings, refused):
    model = loaded(family, **settings)
    asked = replace(EVERYTHING, full=True, later=4)
    result = validate_context(model, LETTERS, asked, exact=copy.deepcopy(model.model).double())
    assert set(result.refused) == set(refused)
    for name, kind in refused.items():
        assert LACKING[kind] in result.refused[name]
    rows = result.tables
    assert {name for name, table in rows.items() if table.empty} == {name for name in refused if name in rows}
    for name in ("heads", "single"):
        assert (rows[name]["violations"] == 0).all()
        assert (rows[name]["perturbation"] <= rows[name]["theta"] * (1 + 1e-5) + 1e-9).all()
    assert (
        rows["layers"]
        .loc[rows["layers"]["policy"].isin(POLICIES) & (rows["layers"]["queries"] != "window"), "drift"]
        .notna()
        .all()
    )
    assert set(rows["runs"]["policy"]) >= {"snapkv", "adakv", "random"} | {"fisher"} - set(refused)
    best = rows["single"].pivot(index=["layer", "head", "norm"], columns="choice", values="perturbation")
    assert ("least L found" in best) == ("least L found" not in refused)
    if "least L found" in best:
        found = best.xs("L2", level="norm").dropna()
        assert len(found)
        assert (found["least L found"] <= found.drop(columns="least L found").min(axis=1) * (1 + 1e-5)).all()


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "settings"), [("mistral", {"sliding_window": 8}), ("deepseek_v3", {}), ("gemma3_text", {"sliding_window": 8})]
)
def test_rows_of_other_kinds_are_those_of_hiding_the_same_entries(family, settings):
    """The pair at one budget: KL by the full cache with entries hidden, L by the outputs that attention gives then."""
    model = loaded(family, **settings).model
    rows = validate_context(LoadedModel(model, Letters(), "tiny", "random"), LETTERS, replace(SETTINGS, budgets=(0.5,))).tables
    prefilled = prefill(model, LETTERS.tokens, choices(SETTINGS).policies["snapkv"], 0.5)
    keep = look(model, LETTERS.tokens, window=4).decide(choices(SETTINGS).policies["snapkv"], 0.5)
    tokens = [prefilled.logits.argmax(-1)]
    for _ in range(5):
        tokens.append(model(torch.cat([LETTERS.tokens, *tokens], 1)).logits[:, -1:].argmax(-1))
    decoded = torch.cat(tokens, 1)

    def run(masks):
        cache = DynamicCache(config=model.config)
        forward(model, LETTERS.tokens, cache)
        with hiding(model, masks) if masks else nullcontext(), capture(model, window=None) as captured:
            return forward(model, decoded, cache).double(), captured

    (full, before), (hidden, _) = run(None), run(keep)
    full, hidden = full[0, :5].log_softmax(-1), hidden[0, :5].log_softmax(-1)
    kl = rows["runs"].set_index("policy")["kl"]["snapkv"]
    assert kl == pytest.approx(float((full.exp() * (full - hidden)).sum(-1).mean()), rel=1e-3)
    heads = rows["heads"].set_index(["layer", "head", "policy", "queries", "norm"])["perturbation"]
    record = before[2]
    lost = ~keep[2].expand(-1, record.n_kv_heads, -1)
    kept = torch.cat([~lost, lost.new_ones(1, lost.shape[1], 6)], -1)[..., -record.n_keys :]
    weights, _ = attention_weights(**record.inputs)
    truth = perturbation(weights, record.values, record.projection_blocks, kept, norm=1)[0, :, 0]
    for head in range(4):
        assert heads[2, head, "snapkv", "first", "L1"] == pytest.approx(float(truth[head]), rel=1e-4)


def test_a_family_without_a_cache_of_entries_is_refused():
    with pytest.raises(UnsupportedAttention, match="nothing to evict"):
        validate_context(loaded("qwen3_next"), LETTERS, SETTINGS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_run_too(dtype):
    model = loaded(dtype=dtype)
    result = validate_context(model, LETTERS, EVERYTHING, exact=copy.deepcopy(model.model).double())
    assert result.refused == {}
    for name in ("heads", "single"):
        assert (result.tables[name]["violations"] == 0).all()


def test_a_stopped_run_goes_on_without_computing_a_context_twice(tmp_path, monkeypatch):
    whole = validate(SETTINGS, tmp_path / "whole", loaded=loaded())
    computed = []

    def counted(model, context, *rest):
        computed.append(context.name)
        if len(computed) == 2:
            raise KeyboardInterrupt
        return validate_context(model, context, *rest)

    monkeypatch.setattr(run_module, "validate_context", counted)
    with pytest.raises(KeyboardInterrupt):
        validate(SETTINGS, tmp_path / "run", loaded=loaded())
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".progress"]
    resumed = validate(SETTINGS, tmp_path / "run", loaded=loaded())
    assert computed == [*(text.name for text in texts(SETTINGS)), texts(SETTINGS)[1].name]
    for table in TABLES:
        pd.testing.assert_frame_equal(resumed.tables[table.name], whole.tables[table.name], check_exact=True)
    assert not (tmp_path / "run" / ".progress").exists()


def test_an_unfinished_run_is_not_mixed_with_other_settings(tmp_path, monkeypatch):
    out = tmp_path / "run"
    validate(SETTINGS, out, loaded=loaded())
    with pytest.raises(InputError, match="is not empty"):
        validate(SETTINGS, out, loaded=loaded())
    shutil.rmtree(out)
    (out / ".progress").mkdir(parents=True)
    (out / ".progress" / "fingerprint").write_text("another")
    with pytest.raises(InputError, match="unfinished run with other settings"):
        validate(SETTINGS, out, loaded=loaded())


def test_an_empty_folder_may_be_given(tmp_path):
    (tmp_path / "empty").mkdir()
    settings = ValidationSettings(**PAIR, passages=1, context_length=40, budgets=(0.5,), later=2)
    assert validate(settings, tmp_path / "empty", loaded=loaded()).report.parent == tmp_path / "empty"


def test_a_model_that_capture_does_not_reproduce_is_refused_and_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "analysis.experiments.reproduction.attention_output", lambda weights, values: torch.ones(1, 4, weights.shape[2], 8)
    )
    with pytest.raises(SelfCheckFailed, match="'attention' failed"):
        validate(SETTINGS, tmp_path / "run", loaded=loaded())
    assert not (tmp_path / "run").exists()


def test_the_report_escapes_what_comes_from_file_names(tmp_path):
    evil = tmp_path / "<script>alert(1)<&>.txt"
    evil.write_text("some words, and more words; " * 10)
    settings = ValidationSettings(**PAIR, context_files=(evil,), context_length=40, budgets=(0.5,), later=2)
    page = validate(settings, tmp_path / "run", loaded=loaded()).report.read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    return validate(EVERYTHING, tmp_path_factory.mktemp("everything"), loaded=loaded())


def test_a_whole_validation_decides_every_claim_that_it_has_rows_for(everything, tmp_path):
    found = everything.claims.set_index("id")
    missing = found.index[found["verdict"] == "not measured"]
    assert set(missing) == {"C4", "C7", "C7.adakv", "C7.headkv", "C8", "C9", "C10", "C10.decoding", "B4", "B5"}
    # 2.5 % of 120 entries hold no window of 16
    assert found.loc["O1", "verdict"] == "holds"
    assert found.loc["C2", "setting"].startswith("tiny (random); 2 contexts of 120 tokens; window 4, max-pooling over 3")
    assert everything.about["refused"] == {}
    again = validate(EVERYTHING, tmp_path / "again", loaded=loaded())
    pd.testing.assert_frame_equal(again.claims, everything.claims, check_exact=True)


def test_a_variant_that_says_what_the_settings_say_has_their_rows(everything):
    heads = everything.heads
    keys = ["context", "layer", "head", "budget", "queries", "norm"]
    numbers = {}
    for name in (
        "snapkv+two-stage",
        "snapkv+two-stage:alpha=0.5",
        "snapkv+two-stage:epsilon=0.0001",
        "snapkv+two-stage:norm=1",
    ):
        rows = heads[(heads["policy"] == name) & (heads["budget"] == 0.2) & (heads["norm"] == "L1")]
        numbers[name] = rows.set_index(keys).sort_index().drop(columns=["policy"])
        pd.testing.assert_frame_equal(numbers[name], numbers["snapkv+two-stage"], check_exact=True)
    other = heads[(heads["policy"] == "snapkv+two-stage:alpha=1") & (heads["budget"] == 0.2)].set_index(keys)["perturbation"]
    base = heads[(heads["policy"] == "snapkv") & (heads["budget"] == 0.2) & (heads["norm"] == "L1")].set_index(keys)[
        "perturbation"
    ]
    pd.testing.assert_series_equal(other.sort_index(), base.sort_index())


def test_variants_whose_window_does_not_fit_the_context_are_left_out(everything):
    there = set(everything.heads["policy"])
    assert "snapkv:window=16" in there  # a fifth of 120 entries holds it
    assert "snapkv:window=32" not in there
    assert "snapkv:window=64" not in there


def test_a_budget_of_everything_is_measured_whole(tmp_path):
    settings = replace(EVERYTHING, passages=1, budgets=(1.0,), ablations=())
    done = validate(settings, tmp_path / "run", loaded=loaded())
    assert done.report.exists()
    assert (done.tables["single"]["perturbation"] == 0).all()


def test_allocation_and_kept_tokens_are_what_the_policies_keep(everything):
    allocation, kept = everything.tables["allocation"], everything.tables["kept"]
    uniform = allocation[allocation["policy"] == "snapkv"]
    assert (uniform["kept"] == 24).all()
    name = texts(EVERYTHING)[0].name
    mine = uniform[uniform["context"] == name]
    assert len(mine) == 3 * 2
    for policy in ("snapkv", "fisher", "random"):
        share = kept[(kept["context"] == name) & (kept["policy"] == policy)]
        total = allocation[(allocation["context"] == name) & (allocation["policy"] == policy)]
        assert len(share) == 120
        assert share["share"].sum() * 6 == pytest.approx(total["kept"].sum())
    assert (kept.loc[(kept["policy"] == "snapkv") & (kept["position"] >= 116), "share"] == 1).all()  # the window


@torch.no_grad()
def test_single_heads_are_the_rooms_functions_on_heads_with_entries_of_their_own(everything):
    """One layer: the centred choice and both bounds, by naive sums in float64."""
    model = loaded().model
    tokens = tokenised(texts(EVERYTHING)[0], Letters(), EVERYTHING, None).tokens
    with capture(model, window=1) as captured:
        model(tokens)
    record = captured[1]
    weights = attention_weights(**record.inputs)[0][0, :, 0].double()
    rows = everything.tables["single"]
    rows = rows[(rows["context"] == texts(EVERYTHING)[0].name) & (rows["layer"] == 1) & (rows["norm"] == "L1")].set_index(
        ["choice", "head"]
    )
    for head in range(4):
        written = record.values[0, head // 2].double() @ record.projection_blocks[head].double()
        output = weights[head] @ written
        scores = {"centred": weights[head] * (written - output).abs().sum(-1), "attention": weights[head]}
        for choice, score in scores.items():
            keep = torch.zeros(120, dtype=torch.bool)
            keep[score.argsort(descending=True, stable=True)[:24]] = True
            mass = weights[head][keep].sum()
            other = weights[head][keep] @ written[keep] / mass
            row = rows.loc[choice, head]
            assert row["perturbation"] == pytest.approx(float((output - other).abs().sum()), rel=1e-4)
            assert row["retained_mass"] == pytest.approx(float(mass), rel=1e-5)
            lost, sizes = ~keep, written.abs().sum(-1)
            bound = (weights[head] * sizes)[lost].sum() + (1 / mass - 1) * (weights[head] * sizes)[keep].sum()
            assert row["theta"] == pytest.approx(float(bound), rel=1e-4)
            ours = (weights[head][lost] * (written[lost] - other).abs().sum(-1)).sum()
            assert row["theta_o_hat"] == pytest.approx(float(ours), rel=1e-4)
            assert rows.loc["least θ", head]["lower"] <= row["theta"] * (1 + 1e-5)


def test_entries_are_the_exact_removals_of_the_first_tokens(everything):
    entries = everything.tables["entries"]
    assert len(entries) == 2 * 3 * 2 * 23
    assert (entries["exact"] >= 0).all()


def test_answers_of_an_evaluation_decide_the_claims_about_tasks(tmp_path):
    answers = tmp_path / "answers"
    answers.mkdir()
    SAMPLES.write(worlds.samples(True), answers / SAMPLES.file, {})
    settings = replace(SETTINGS, answers=answers, passages=1, model="made up")
    found = validate(settings, tmp_path / "run", loaded=loaded()).claims.set_index("id")
    assert found.loc[["C7", "C7.adakv", "C7.headkv", "C8", "C9"], "verdict"].tolist() == ["holds"] * 5
    assert "16 samples of 100 tokens" in found.loc["C9", "setting"]
    assert "8 samples of 100 tokens" in found.loc["C7", "setting"]
    with pytest.raises(InputError, match="holds answers of made up; none of another"):
        validate(replace(settings, model="another"), tmp_path / "other", loaded=loaded())
    with pytest.raises(InputError, match=r"holds no samples\.parquet"):
        validate(replace(settings, answers=tmp_path), tmp_path / "other", loaded=loaded())
    with pytest.raises(InputError, match="either it or --answers"):
        replace(settings, full=True)


def test_times_are_taken_in_turns_where_all_is_asked_for():
    context = Context("letters", Letters()("abcdefgh" * 6).input_ids)
    timings = validate_context(loaded(), context, replace(SETTINGS, full=True)).tables["timings"]
    turns = timings.groupby("policy")["repeat"].apply(list).to_dict()
    assert turns == {name: [1, 2, 3] for name in ("full", "snapkv", "snapkv+two-stage", "fisher")}
    assert (timings[["first_token_s", "token_s"]] > 0).all(axis=None)


def test_an_ablation_of_lengths_measures_each_context_at_those_that_it_has(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("forty tokens of text, a letter each: yes.")
    long = tmp_path / "long.txt"
    long.write_text("a text that is longer than that; " * 4)
    settings = replace(SETTINGS, ablations=("length",), lengths=(48, 32), context_files=(short, long))
    done = validate(settings, tmp_path / "run", loaded=loaded())
    tokens = done.runs.groupby("context")["tokens"].first().to_dict()
    assert tokens == {"short.txt (32 tokens)": 32, "long.txt (32 tokens)": 32, "long.txt (48 tokens)": 48}
    assert "snapkv+two-stage:epsilon=0" in set(done.heads["policy"])
    # in the ledger each text counts once, at its longest
    assert done.about["independent"] == ["short.txt (32 tokens)", "long.txt (48 tokens)"]
    assert "2 contexts of 32 to 48 tokens" in done.claims.set_index("id").loc["C2", "setting"]
    with pytest.raises(InputError, match=r"short\.txt has 41 tokens, fewer than the 64"):
        validate(replace(settings, lengths=(64,)), tmp_path / "other", loaded=loaded())


@pytest.mark.parametrize(("name", "option", "value"), [("length", "--context-length", "512"), ("budget", "--budget", "0.3")])
def test_what_an_ablation_varies_cannot_be_fixed(name, option, value, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["criticalkv", "ablate", name, option, value])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert f"leave {option} out" in capsys.readouterr().err


def test_a_full_validation_answers_tasks_and_leaves_head_scores_behind(tmp_path, monkeypatch):
    """In a folder with a colon in its name; the tasks themselves are tested elsewhere, here what is asked and what is made of it."""
    asked = {}

    def answering(grid, folder, *, loaded, report):
        asked["grid"] = grid
        samples = worlds.samples(True)
        scores = grid.policies[4].partition(":scores=")[2]
        assert split_policy(grid.policies[4])[1] == {"scores": scores}
        assert Path(scores).is_file()
        samples["policy"] = samples["policy"].str.replace("some/where.json", scores)
        return type("Evaluation", (), {"samples": samples})

    class Scores:
        def save(self, path):
            path.write_text("{}")

    monkeypatch.setattr(run_module, "evaluate", answering)
    monkeypatch.setattr(run_module, "measure_heads", lambda *_, **__: Scores())
    done = validate(replace(SETTINGS, full=True, passages=1), tmp_path / "a:b", loaded=loaded())
    assert asked["grid"].budgets == (0.4,)
    assert asked["grid"].tasks == ("ruler-offline",)
    found = done.claims.set_index("id")["verdict"]
    assert found[["C7", "C7.adakv", "C7.headkv", "C8"]].tolist() == ["holds"] * 4
    assert "headkv+two-stage" in set(done.tables["samples"]["policy"])
    assert (done.folder / "head-scores.json").read_text() == "{}"


@pytest.mark.parametrize("name", ABLATIONS)
def test_each_ablation_is_one_command_that_prints_what_it_found(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "load_model", lambda settings: loaded(max_position_embeddings=512))
    out = tmp_path / "run"
    given = ["--passages", "2", "--later", "4", "--window", "4", "--out", str(out)]
    given += [] if ABLATIONS[name].lengths else ["--context-length", "400"]
    monkeypatch.setattr("sys.argv", ["criticalkv", "ablate", name, *given])
    asked = replace(ABLATIONS[name], lengths=(64, 96)) if ABLATIONS[name].lengths else ABLATIONS[name]
    monkeypatch.setitem(ABLATIONS, name, asked)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert ABLATIONS[name].question.split()[0] in printed
    for label in list(ABLATIONS[name].variants)[1:]:
        assert all(word in printed for word in label.split())
    assert (out / "heads.parquet").exists()


def test_an_unknown_ablation_is_told_with_the_nearest(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["criticalkv", "ablate", "alfa"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "did you mean alpha?" in capsys.readouterr().err


# ---- the report, made again ----------------------------------------------------------------------------------------


def test_a_report_is_made_again_from_the_rows_and_is_the_same(finished, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(finished.folder, tmp_path / "run")
    before = {path.relative_to(run): path.read_bytes() for path in run.rglob("*.*")}
    for name in ("report.html", "report.md", "claims.parquet"):
        (run / name).unlink()
    shutil.rmtree(run / "figures")
    monkeypatch.setattr("sys.argv", ["criticalkv", "report", str(run)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("Of 43 claims")
    assert {path.relative_to(run): path.read_bytes() for path in run.rglob("*.*")} == before


def test_a_report_made_again_is_one_json_object_where_that_is_asked_for(finished, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(finished.folder, tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["criticalkv", "report", str(run), "--json"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert said["report"] == str(run / "report.html")
    assert [row["id"] for row in said["claims"]] == finished.claims["id"].tolist()
    assert said["claims"][0]["value"] == pytest.approx(finished.claims["value"][0])
    # what was not measured is null, not NaN
    assert [row["value"] is None for row in said["claims"]] == finished.claims["value"].isna().tolist()


@pytest.mark.parametrize("damage", ["no run", "no table", "a truncated table", "another run.json", "no JSON"])
def test_what_is_no_finished_run_is_told_and_left_alone(damage, finished, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    if damage == "no run":
        run.mkdir()
    else:
        shutil.copytree(finished.folder, run)
    if damage == "no table":
        (run / "heads.parquet").unlink()
    if damage == "a truncated table":
        whole = (run / "layers.parquet").read_bytes()
        (run / "layers.parquet").write_bytes(whole[: len(whole) // 2])
    if damage == "another run.json":
        (run / "run.json").write_text('{"settings": {}}')
    if damage == "no JSON":
        (run / "run.json").write_text("{")
    before = {path: path.read_bytes() for path in run.rglob("*.*")}
    monkeypatch.setattr("sys.argv", ["criticalkv", "report", str(run)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert {path: path.read_bytes() for path in run.rglob("*.*")} == before


def test_markdown_shows_names_as_they_are(tmp_path):
    evil = tmp_path / "a*b_<i>[x](y).txt"
    evil.write_text("some words, and more words; " * 10)
    settings = ValidationSettings(**PAIR, context_files=(evil,), context_length=40, budgets=(0.5,), later=2)
    page = (validate(settings, tmp_path / "run", loaded=loaded()).folder / "report.md").read_text()
    assert r"a\*b\_\<i\>\[x\](y).txt" in page


# ---- the command line -----------------------------------------------------------------------------------------------

MISTAKES = {
    "an unknown model": (["--model", "no/such-model-anywhere"], "cannot load the model"),
    "a budget of 0": (["--budgets", "0.1,0"], "a share of the cache in (0, 1], not 0"),
    "a budget above 1": (["--budgets", "1.5"], "a share of the cache in (0, 1], not 1.5"),
    "a budget that is no number": (["--budgets", "a lot"], "numbers separated by commas"),
    "a budget that is not finite": (["--budgets", "nan"], "a share of the cache in (0, 1]"),
    "a budget twice": (["--budgets", "0.2,0.20"], "names a budget twice"),
    "no budget": (["--budgets", ","], "at least one"),
    "a context shorter than the window": (["--context", "{short}"], "no more than the window"),
    "a context too short for the budget": (["--context-length", "100"], "at least 33 entries, that is 33 % of this context"),
    "a context longer than the model": (["--context-length", "9000"], "exceed the 8192 positions"),
    "a file that is not text": (["--context", "{binary}"], "is not text in UTF-8"),
    "a file with NUL bytes": (["--context", "{nul}"], "NUL bytes"),
    "a file that is missing": (["--context", "{missing}"], "cannot be read: No such file"),
    "a folder as a file": (["--context", "{folder}"], "is a folder"),
    "an output below a file": (["--out", "{short}/run"], "cannot be written"),
    "an output that is a file": (["--out", "{short}"], "is a file"),
    "an output that is not empty": (["--out", "{folder}"], "is not empty"),
    "an even kernel": (["--kernel", "4"], "must be odd"),
    "an alpha above 1": (["--alpha", "2"], "lies in [0, 1]"),
    "an epsilon below 0": (["--epsilon", "-1"], "at least 0"),
    "an unknown pooling": (["--pooling", "median"], "one of max, mean, none"),
    "an unknown dtype": (["--dtype", "int8"], "one of float32"),
    "an unknown device": (["--device", "cuda:7"], "is not available"),
    "more passages than topics": (["--passages", "100"], "--passages is at most"),
    "an output with a name too long": (["--out", "x" * 300], "cannot be written"),
    "a device without numbers": (["--device", "meta"], "holds no numbers"),
    "more tokens to follow than positions": (["--later", "100000"], "add up to less than 8192"),
    "no passages": (["--passages", "0"], "at least 1"),
}


@pytest.mark.reference
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_and_exit_code_2_and_writes_nothing(mistake, tmp_path, monkeypatch, capsys):
    arguments, message = MISTAKES[mistake]
    places = {name: tmp_path / name for name in ("short", "binary", "nul", "missing", "folder")}
    places["short"].write_text("a few words")
    places["binary"].write_bytes(b"\xff\xfe\x00binary" * 100)
    places["nul"].write_bytes(b"text\0text" * 100)
    places["folder"].mkdir()
    (places["folder"] / "something").write_text("kept")
    monkeypatch.chdir(tmp_path)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    filled = [argument.format(**places) for argument in arguments]
    monkeypatch.setattr("sys.argv", ["criticalkv", "validate", *filled])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert message in " ".join(printed.err.split())
    assert "Traceback" not in printed.err
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_an_unknown_option_is_exit_code_2():
    assert CliRunner().invoke(cli.app, ["validate", "--badgets", "0.2"]).exit_code == 2


def test_version_and_help_answer():
    assert CliRunner().invoke(cli.app, ["--version"]).output.strip() == "0.1.0"
    help_text = CliRunner().invoke(cli.app, ["validate", "--help"]).output
    assert "--context-length" in help_text


@pytest.mark.reference
def test_the_reference_model_is_validated_from_the_command_line(reference, tmp_path, monkeypatch, capsys):
    """The README's command on a small setting: exit code 0, figures, and a truth below its bound everywhere."""
    monkeypatch.setattr(run_module, "load_model", lambda settings: reference)
    out = tmp_path / "run"
    arguments = [
        "validate",
        "--passages",
        "1",
        "--context-length",
        "256",
        "--budgets",
        "0.2,0.4",
        "--later",
        "8",
        "--out",
        str(out),
    ]
    monkeypatch.setattr("sys.argv", ["criticalkv", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct (weights stored as Q4_1, dequantised)" in printed
    assert "L ≤ θ held for every query of every head." in printed
    assert "report.html" in printed
    heads = TABLES[0].read(out / "heads.parquet")
    assert len(heads[heads["policy"].isin(POLICIES)]) == 30 * 9 * 2 * 2 * 3 * 2
    assert (heads["violations"] == 0).all()
    assert np.isfinite(heads["perturbation"]).all()
    assert (heads["perturbation"] > 0).mean() > 0.99
    about = json.loads((out / "run.json").read_text())
    assert about["selfcheck"]["attention"] < about["selfcheck"]["tolerance"]
    assert about["provenance"]["command"].startswith("criticalkv validate --passages 1")
