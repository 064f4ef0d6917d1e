"""Every benchmark starts; the GPU benchmark, which no CI machine can run as it is, works: on a CPU it runs at a toy size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("[a-z]*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_finds_the_packages_beside_scripts_of_the_same_names(script):
    ran = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "--json" in ran.stdout


def test_the_gpu_benchmark_runs_on_a_cpu_at_a_toy_size():
    script = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
    ran = subprocess.run([sys.executable, script, "--json"], capture_output=True, text=True, timeout=600, env=None, check=False)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["capture_identical"] is True
    assert figures["float32_error"] < 1e-5
    assert figures["bfloat16_error"] < 1e-5  # float32 at this size
    assert figures["cache_ragged_gb"] < 0.25 * figures["cache_full_gb"]
    assert figures["peak_chunked_gb"] < figures["peak_evicting_gb"]
    assert all(value == value for value in figures.values())
