"""How every benchmark measures: interleaved pairs in one run after a warm-up, the median ratio, one JSON object at the end.

Each script imports it before the packages: it puts the repository's root before this folder, where `eviction.py` has the name of one.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

THREADS = 2
PAIRS = 5


def arguments(description: str) -> argparse.Namespace:
    """The options that every script has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="interleaved pairs, at least 5 for a figure to report")
    return parser.parse_args()


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median_ratio(measured: Callable[[], object], base: Callable[[], object], pairs: int, quiet: bool) -> dict[str, float]:
    """Median over pairs of time(measured) / time(base), with the ratios' range and the median times."""
    measured(), base()  # warm-up
    ratios, times = [], []
    for number in range(pairs):
        below, above = seconds(base), seconds(measured)
        ratios.append(above / below)
        times.append((above, below))
        if not quiet:
            print(f"pair {number + 1}: {above:.2f} s / {below:.2f} s = {ratios[-1]:.2f}", file=sys.stderr)
    return {
        "median": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "measured_s": statistics.median(above for above, _ in times),
        "base_s": statistics.median(below for _, below in times),
    }


def finish(figures: dict[str, object]) -> None:
    """Print the figures as the last line."""
    print(json.dumps({name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in figures.items()}))


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator held at once during `work`, beyond what it held before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
