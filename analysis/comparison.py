"""Two runs side by side: paired differences with intervals. DataFrame in, DataFrame out; loads neither torch nor transformers."""

from pathlib import Path

import pandas as pd
import pyarrow as pa

from analysis.errors import InputError, first_line
from analysis.schema import SAMPLES, Table
from analysis.statistics import adjusted, compare

PAIR = ["model", "source", "task", "length", "question", "seed", "sample", "policy", "budget"]
"""What must agree for two rows to be a pair; the model only where the runs share one."""
BY = ["source", "task", "length", "question", "policy", "budget"]
MEASURES = ("score", "kl", "agreement", "perturbation", "bytes")


def read_run(folder: Path) -> pd.DataFrame:
    """The rows of a run's `samples.parquet`.

    Raises:
        InputError: there is none, it is damaged, or it holds another table.
    """
    path = folder / SAMPLES.file if folder.is_dir() else folder
    if not path.is_file():
        raise InputError(f"{folder} holds no {SAMPLES.file}; give the folder of an evaluation or a sweep that came to its end")
    return rows(SAMPLES, path)


def rows(table: Table, path: Path) -> pd.DataFrame:
    """The rows of a table's file.

    Raises:
        InputError: it is missing, damaged, or holds another table.
    """
    if not path.is_file():
        raise InputError(f"{path} is missing")
    try:
        return table.read(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error


def compared(first: pd.DataFrame, second: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Mean of second − first over the samples that both runs have, a row per task, length, policy, budget and measure.

    Columns: those of `BY`, `measure`, `pairs`, `first`, `second` (means), `difference`, `low`, `high` (bootstrap over pairs, 95 %), `p`
    (Wilcoxon's signed-rank test) and `p_adjusted` (Benjamini-Hochberg over all rows). Measures that a run lacks are left out.

    Raises:
        InputError: the runs share no sample, policy and budget.
    """
    keys = PAIR if set(first["model"]) & set(second["model"]) else PAIR[1:]
    for frame, which in ((first, "first"), (second, "second")):
        if frame.duplicated(keys).any():
            raise InputError(f"the {which} run has several models and the other none of them: compare runs of one model each")
    both = first.merge(second, on=keys, suffixes=("_first", "_second"), validate="one_to_one")
    if both.empty:
        raise InputError("the runs share no sample, policy and budget; nothing can be compared pair by pair")
    differ = both["answer_first"] != both["answer_second"]
    if differ.any():
        raise InputError(
            f"{int(differ.sum())} of {len(both)} samples of the same name have other answers: the runs' data differ"
        )
    rows = []
    for group, part in both.groupby(BY, sort=False):
        for measure in MEASURES:
            one, other = part[f"{measure}_first"], part[f"{measure}_second"]
            known = one.notna() & other.notna()
            if not known.any():
                continue
            found = compare(other[known], one[known], seed)
            rows.append(
                {
                    **dict(zip(BY, group, strict=True)),  # type: ignore[call-overload]
                    "measure": measure,
                    "pairs": int(known.sum()),
                    "first": float(one[known].mean()),
                    "second": float(other[known].mean()),
                    "difference": found.value,
                    "low": found.low,
                    "high": found.high,
                    "p": found.p,
                }
            )
    table = pd.DataFrame(rows)
    table["p_adjusted"] = adjusted(table["p"])
    return table
