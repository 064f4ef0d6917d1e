"""What a sweep wastes: how much faster two workers are than one, and what a shared prefill saves.

`two_worker_speedup`: the time in which one Ray worker of one thread finishes 16 cells, over the time in which two such workers do; start-up
and loading apart. `shared_over_apart`: the time of 5 policies × 4 budgets on one context of 2,048 tokens, computed together, over the time of
the same 20 cells one by one, each with a prefill of its own.
"""

import argparse
import statistics
import sys
import time

import torch
from _pairs import THREADS, finish, median_ratio

from analysis.experiments.engines import Job, Ray
from analysis.experiments.study import compute, plan, policies
from analysis.grid import Grid
from hooks import load
from hooks.reference import REFERENCE

POLICIES = ("snapkv", "snapkv+two-stage", "adakv+two-stage", "expected-attention", "fisher")
BUDGETS = (0.1, 0.2, 0.4, 0.6)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--pairs", type=int, default=3, help="interleaved pairs")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the context whose prefill is shared")
    return parser.parse_args()


def shared(options: argparse.Namespace) -> dict[str, float]:
    """Together over apart."""
    torch.set_num_threads(THREADS)
    loaded = load()
    grid = Grid(lengths=(options.tokens,), samples=1, policies=POLICIES, budgets=BUDGETS, max_new_tokens=16)
    (group,) = plan(grid, REFERENCE, loaded.tokenizer, None)
    chosen = policies(grid)
    cells = [one.id for one in group.cells if one.cell[0] != "full"]

    def together() -> None:
        list(compute(loaded, chosen, grid.judge, group, set(cells)))

    def apart() -> None:
        for cell in cells:
            list(compute(loaded, chosen, grid.judge, group, {cell}))

    return median_ratio(together, apart, options.pairs, options.json)


def workers(options: argparse.Namespace) -> list[float]:
    """Speedups of two workers over one, each measured from the first outcome of every worker on, so that loading is not counted."""
    grid = Grid(lengths=(512,), samples=10, policies=("snapkv",), budgets=(0.2,), max_new_tokens=16)
    groups = plan(grid, REFERENCE, load().tokenizer, None)
    import ray

    def seconds(count: int) -> float:
        """Time for 16 cells, 8 groups of 2; the groups before warm the workers up."""
        warm = groups[8 : 8 + count]
        jobs = [Job(group, frozenset(one.id for one in group.cells)) for group in (*warm, *groups[:8])]
        warming = sum(len(group.cells) for group in warm)
        engine = Ray(workers=count)
        start = None
        for done, (_, _, found) in enumerate(engine.run(grid, jobs, lambda what: None), 1):
            if isinstance(found, str):
                raise SystemExit(found)
            if done == warming:
                start = time.perf_counter()
        assert start is not None
        return time.perf_counter() - start

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        found = []
        for number in range(options.pairs):
            one, two = seconds(1), seconds(2)
            found.append(one / two)
            if not options.json:
                print(f"pair {number + 1}: {one:.2f} s / {two:.2f} s = {found[-1]:.2f}", file=sys.stderr)
        return found
    finally:
        ray.shutdown()


def main() -> None:
    options = arguments()
    speedups = workers(options)
    ratio = shared(options)
    finish(
        {
            "two_worker_speedup": statistics.median(speedups),
            "two_worker_speedup_low": min(speedups),
            "two_worker_speedup_high": max(speedups),
            "shared_over_apart": ratio["median"],
            "shared_over_apart_low": ratio["low"],
            "shared_over_apart_high": ratio["high"],
            "shared_s": ratio["measured_s"],
            "apart_s": ratio["base_s"],
            "threads": THREADS,
        }
    )


if __name__ == "__main__":
    main()
