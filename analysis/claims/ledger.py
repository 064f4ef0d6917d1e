"""The ledger: each claim, what was measured of it, and the verdict."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.claims.declared import CLAIMS
from analysis.claims.rules import Claim, Tables, verdict
from analysis.schema import CLAIMS as TABLE
from analysis.schema import RUNS, SAMPLES
from analysis.statistics import Estimate, student
from analysis.wording import label

NOTHING = Estimate(float("nan"), float("nan"), float("nan"))


def ledger(tables: Tables, about: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of the table `claims`, in the order of `CLAIMS`.

    A claim's value is the mean over contexts with Student's interval at 95 %, or over samples with that of its measure. It is decided where
    the whole interval lies on one side of the rule's threshold.

    Args:
        tables: of a run, by name; `samples` of an evaluation among them where there is one.
        about: the run's `run.json`.
    """
    rows = []
    for claim in CLAIMS:
        found = measured(claim, tables)
        decided = verdict(claim.rule, found)
        there = decided != "not measured"
        rows.append(
            {
                "id": claim.id,
                "statement": claim.statement,
                "paper_value": claim.paper_value,
                "value": found.value,
                "low": found.low,
                "high": found.high,
                "verdict": decided,
                "setting": setting(claim, tables, about) if there else claim.how,
                "command": about["provenance"]["command"] if there else claim.command,
            }
        )
    return TABLE.checked(pd.DataFrame(rows).astype({"value": float, "low": float, "high": float}))


def measured(claim: Claim, tables: Tables) -> Estimate:
    """A claim's value and interval; NaN where its rows are not there."""
    found = claim.measure(tables)
    if isinstance(found, Estimate):
        return found
    if found is None or not len(found.dropna()):
        return NOTHING
    return student(found.dropna())


def setting(claim: Claim, tables: Tables, about: Mapping[str, Any]) -> str:
    """On what a claim was measured, in words."""
    name = label(about["model"])
    if claim.over == "samples":
        samples = tables[SAMPLES.name]
        lengths = ", ".join(f"{length:,}" for length in sorted(samples["length"].unique()) if length)
        number = samples.groupby(["source", "length", "seed", "sample"]).ngroups
        return f"{name}; {number} samples of {lengths or 'as many as they have'} tokens; {claim.how}"
    tokens = tables[RUNS.name].groupby("context")["tokens"].first()
    count = f"{len(tokens)} context{'' if len(tokens) == 1 else 's'}"
    span = f"{tokens.min():,}" if tokens.min() == tokens.max() else f"{tokens.min():,} to {tokens.max():,}"
    given = about["settings"]
    return (
        f"{name}; {count} of {span} tokens; window {given['window']}, {given['pooling']}-pooling over {given['kernel']}, "
        f"α = {given['alpha']:g}, ε = {given['epsilon']:g}; {claim.how}"
    )
