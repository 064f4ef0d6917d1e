"""What is light stays light: checked in fresh interpreters."""

import subprocess
import sys

import pytest


def loaded(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("package", ["bounds", "perturbation"])
def test_the_theory_loads_torch_but_never_transformers(package):
    modules = loaded(f"import {package}")
    assert "torch" in modules
    assert not {"transformers", "hooks"} & modules


@pytest.mark.parametrize(
    "module",
    [
        "ablations",
        "schema",
        "settings",
        "summary",
        "statistics",
        "scores",
        "comparison",
        "grid",
        "tasks",
        "figures",
        "claims",
        "report",
        "cli.app",
    ],
)
def test_reading_rows_loads_neither_torch_nor_transformers(module):
    assert not {"torch", "transformers"} & loaded(f"import analysis.{module}")


def test_importing_hooks_patches_nothing():
    changed = (
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as f; before = dict(f); import hooks, eviction; "
        "assert dict(f) == before; import torch; assert not torch.nn.modules.module._global_forward_hooks"
    )
    loaded(changed)


WITHOUT = """
import sys
sys.path.insert(0, "tests")

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import inspect
import analysis.claims, analysis.figures, analysis.schema
import known_rows, worlds
from analysis.ablations import ABLATIONS

tables = worlds.world(True)
ledger = analysis.claims.ledger(tables, worlds.ABOUT)
assert set(ledger.loc[ledger["verdict"] != "holds", "id"]) == {"Q2.truth"}  # which can only be refuted
samples = known_rows.samples(lambda policy, budget, sample: float(policy == "full" or sample % 2), perturbation=lambda *of: 1 + of[2] / 10)
samples["depth"] = samples["sample"] % 3 / 2
heads, layers = tables["heads"], tables["layers"]
given = {
    "ablation": lambda f: f(heads, ABLATIONS["alpha"]),
    "allocation_map": lambda f: f(tables["allocation"], policy="fisher"),
    "bound_tightness": lambda f: f(heads, budget=0.2),
    "bounds_compared": lambda f: f(tables["single"]),
    "budget_curve": lambda f: f(heads),
    "drift": lambda f: f(layers, budget=0.2),
    "gallery": lambda f: f(tables, "a model"),
    "head_map": lambda f: f(heads, budget=0.2),
    "kept_tokens": lambda f: f(tables["kept"], policy="fisher"),
    "kl_by_budget": lambda f: f(tables["runs"]),
    "layer_perturbation": lambda f: f(layers, budget=0.2),
    "leave_one_out": lambda f: f(tables["entries"]),
    "needle_map": lambda f: f(samples, policy="snapkv", budget=0.2),
    "optimum_gap": lambda f: f(tables["single"]),
    "retained_mass": lambda f: f(heads),
    "score_by_budget": lambda f: f(samples),
    "score_by_perturbation": lambda f: f(samples),
    "win_rate": lambda f: f(heads),
}
assert set(given) == set(analysis.figures.__all__), set(given) ^ set(analysis.figures.__all__)
for name, draw in given.items():
    drawn = draw(getattr(analysis.figures, name))
    assert drawn, name
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_claims_and_every_figure_work_where_torch_and_transformers_cannot_be_imported():
    found = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
