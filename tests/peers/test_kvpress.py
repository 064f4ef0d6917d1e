"""On Llama the policies keep exactly the entries that public code, kvpress 0.5.5, keeps."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from models import prompt, tiny

from eviction import policy, prefill

PYTHON = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no environment with kvpress: `make peers` makes it")

# ratios that binary fractions hold, since kvpress rounds n (1 − ratio) down; and α b not below the window, which it protects by stage 1 alone
CASES = [
    {"length": length, "budget": budget, "window": window, "kernel": kernel, "alpha": alpha, "epsilon": epsilon, "seed": seed}
    for seed, (length, budget) in enumerate([(64, 32), (200, 50), (256, 128), (96, 24)])
    for window, kernel in [(8, 5), (4, 1), (2, 7)]
    for alpha, epsilon in [(None, 0.0), (0.5, 1e-4), (0.5, 1e-2), (0.75, 0.0)]
]


@torch.no_grad()
def test_snapkv_and_two_stage_keep_what_kvpress_keeps(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    cases = [
        {**case, "tokens": prompt(case["length"], seed=case["seed"])[0].tolist(), "ratio": 1 - case["budget"] / case["length"]}
        for case in CASES
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("kvpress_choices.py")
    ran = subprocess.run([PYTHON, script, tmp_path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    apart = 0
    for case, theirs in zip(CASES, json.loads((tmp_path / "choices.json").read_text()), strict=True):
        settings = {"window": case["window"], "kernel": case["kernel"], "pooling": "mean"}
        if case["alpha"] is None:
            ours = policy("snapkv", **settings)
        else:
            settings |= {"alpha": case["alpha"], "epsilon": case["epsilon"], "share_of": "budget"}
            ours = policy("snapkv+two-stage", **settings)
        tokens = prompt(case["length"], seed=case["seed"])
        for decision, layer in zip(prefill(model, tokens, ours, case["budget"]).decisions, theirs, strict=True):
            assert [head.nonzero().flatten().tolist() for head in decision.keep[0]] == layer, case
        plain = prefill(
            model, tokens, policy("snapkv", window=case["window"], kernel=case["kernel"], pooling="mean"), case["budget"]
        )
        apart += any(
            decision.keep[0].nonzero().tolist() != [[h, i] for h, head in enumerate(layer) for i in head]
            for decision, layer in zip(plain.decisions, theirs, strict=True)
        )
    assert apart > len(CASES) / 3  # two stages choose otherwise than one, so that the agreement means something


def test_the_page_for_those_who_come_from_it_names_every_press():
    listed = subprocess.run(
        [PYTHON, "-c", "import kvpress; print(*kvpress.__all__)"], capture_output=True, text=True, check=True
    )
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "kvpress.md").read_text(encoding="utf-8")
    assert [name for name in listed.stdout.split() if f"`{name}" not in page and f"({name}" not in page] == []
