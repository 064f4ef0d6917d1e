"""Does less perturbation mean better answers? Tasks on the reference model, under policies and budgets, and what goes with the score.

Writes nothing but what `evaluate` writes into --out, and goes on from there. Prints a table, and one JSON object with the full cache's score on
each task, each policy's mean change, and Spearman's ρ of perturbation, KL and score.
"""

import argparse
import tempfile
from pathlib import Path

import pandas as pd
from _pairs import finish
from rich.console import Console

from analysis.cli.progress import progress_bar
from analysis.experiments.evaluate import evaluate
from analysis.grid import Grid
from analysis.schema import FULL, SAMPLES
from analysis.scores import predictors, scores
from analysis.statistics import compare

TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multivalue",
    "niah_multiquery",
    "fwe",
    "needle",
    "fidelity",
)
"""Those that the reference model can do at 1,024 tokens."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--quick", action="store_true", help="two tasks of 300 tokens, two samples each: to see that it runs")
    parser.add_argument("--aware", action="store_true", help="let policies see the question")
    parser.add_argument("--samples", type=int, default=20, help="samples of each task")
    parser.add_argument("--task", default=",".join(TASKS), help="tasks, separated by commas")
    parser.add_argument("--out", type=Path, help="keep the run here, and go on from it")
    parser.add_argument("--read", type=Path, nargs="+", help="print what samples.parquet of runs hold, and run nothing")
    return parser.parse_args()


def measured(options: argparse.Namespace) -> pd.DataFrame:
    if options.read is not None:
        parts = [SAMPLES.read(path) for path in options.read]
        return SAMPLES.checked(pd.concat(parts, ignore_index=True))
    quick = options.quick
    grid = Grid(
        tasks=TASKS[:1] + TASKS[-1:] if quick else tuple(options.task.split(",")),
        lengths=(300,) if quick else (1024,),
        samples=2 if quick else options.samples,
        aware=options.aware,
        max_new_tokens=8 if quick else 48,
    )
    with tempfile.TemporaryDirectory() as scratch, progress_bar(Console(stderr=True, quiet=options.json)) as bar:
        task = bar.add_task("", total=None)
        found = evaluate(
            grid,
            options.out or Path(scratch),
            report=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
        )
        if found.failures:
            raise SystemExit(f"cells failed: {set(found.failures.values())}")
    return found.samples


def main() -> None:
    options = arguments()
    samples = measured(options)
    table = scores(samples)
    figures: dict[str, object] = {"samples": len(samples[samples["policy"] == FULL]), "question": samples["question"].iloc[0]}
    for row in table[table["policy"] == FULL].to_dict("records"):
        figures[f"full_{row['task']}"] = row["score"]
    evicted = samples[samples["policy"] != FULL]
    for (policy, budget), part in evicted.groupby(["policy", "budget"], sort=False):
        value, low, high, _ = compare(part["score"], part["full_score"])
        figures |= {f"{policy}_{budget:g}": value, f"{policy}_{budget:g}_low": low, f"{policy}_{budget:g}_high": high}
    found = predictors(samples)
    pooled = found[(found["task"] == "all tasks") & (found["budget"] == "all budgets")]
    for row in pooled.to_dict("records"):
        name = f"rho_{row['predictor']}"
        figures |= {name: row["rho"], f"{name}_low": row["rho_low"], f"{name}_high": row["rho_high"]}
    if not options.json:
        with pd.option_context("display.width", 200, "display.max_rows", 500, "display.max_columns", 30):
            print(
                table.pivot_table(index=["policy", "budget"], columns="task", values="score", sort=False).round(2).to_string()
            )
            print(found.round(2).to_string(index=False))
    finish(figures)


if __name__ == "__main__":
    main()
