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
    ["schema", "settings", "summary", "statistics", "scores", "comparison", "grid", "tasks", "figures", "report", "cli.app"],
)
def test_reading_rows_loads_neither_torch_nor_transformers(module):
    assert not {"torch", "transformers"} & loaded(f"import analysis.{module}")


def test_importing_hooks_patches_nothing():
    changed = (
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as f; before = dict(f); import hooks, eviction; "
        "assert dict(f) == before; import torch; assert not torch.nn.modules.module._global_forward_hooks"
    )
    loaded(changed)
