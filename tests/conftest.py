"""Shapes and dtypes in signatures are checked while the tests run; users pay nothing for them."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub; an unknown model is refused at once

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: more threads would stand in each other's way
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; commands and notebooks that a test starts inherit it

from jaxtyping import install_import_hook

install_import_hook(["hooks", "perturbation", "bounds", "eviction", "analysis"], "checks.checked")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

hypothesis.settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("nightly", max_examples=5000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def reference():
    """The real reference model, loaded once."""
    from hooks.reference import load

    return load()


@pytest.fixture(autouse=True)
def _same_everywhere():
    torch.manual_seed(0)
