"""The ledger: each claim, what was measured of it, and the verdict."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from analysis.ablations import CANDIDATE
from analysis.claims.commands import completed
from analysis.claims.declared import CLAIMS
from analysis.claims.measures import middle
from analysis.claims.rules import BUDGETS, MIDDLE, Claim, Tables, verdict
from analysis.schema import CLAIMS as TABLE
from analysis.schema import HEADS, RUNS, SAMPLES
from analysis.statistics import Estimate, student
from analysis.tasks import GROUPS
from analysis.wording import label, percent

NOTHING = Estimate(float("nan"), float("nan"), float("nan"))
NEAREST = "the budget nearest to 20 %"


class Looked(Mapping[str, pd.DataFrame]):
    """A run's tables, and which empty ones were looked at; a table that is not there is empty."""

    def __init__(self, tables: Tables) -> None:
        self._tables, self.lacking = tables, set[str]()

    def __getitem__(self, name: str) -> pd.DataFrame:
        found = self._tables[name] if name in self._tables else SAMPLES.checked(pd.DataFrame())
        if found.empty:
            self.lacking.add(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def ledger(tables: Tables, about: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of the table `claims`, in the order of `CLAIMS`.

    A claim's value is the mean over contexts with Student's interval at 95 %, or over samples with that of its measure. It is decided where
    the whole interval lies on one side of the rule's threshold. Of texts that were measured at several lengths the longest counts alone, since
    pieces of one text are no independent draws.

    Args:
        tables: of a run, by name; `samples` of an evaluation among them where there is one.
        about: the run's `run.json`.
    """
    once = about.get("independent", about["contexts"])
    tables = {name: rows[rows["context"].isin(once)] if "context" in rows else rows for name, rows in tables.items()}
    rows = []
    for claim in CLAIMS:
        looked = Looked(tables)
        found = measured(claim, looked)
        decided = verdict(claim.rule, found)
        there = decided != "not measured"
        reasons = [about["refused"][name] for name in (*sorted(looked.lacking), *claim.needs) if name in about["refused"]]
        rows.append(
            {
                "id": claim.id,
                "statement": claim.decided_by,
                "paper_value": claim.paper_value,
                "value": found.value,
                "low": found.low,
                "high": found.high,
                "verdict": decided,
                "setting": setting(claim, tables, about) if there else "; ".join([_how(claim, tables), *reasons]),
                "command": about["provenance"]["command"] if there else completed(claim.command, about["settings"]),
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
    if claim.over != "contexts":
        samples = tables[SAMPLES.name]
        samples = samples[samples["source"].isin(GROUPS[claim.over])]
        lengths = ", ".join(f"{length:,}" for length in sorted(samples["length"].unique()) if length)
        number = samples.groupby(["source", "length", "seed", "sample"]).ngroups
        return f"{name}; {number} samples of {lengths or 'as many as they have'} tokens; {_how(claim, tables)}"
    tokens = tables[RUNS.name].groupby("context")["tokens"].first()
    count = f"{len(tokens)} context{'' if len(tokens) == 1 else 's'}"
    span = f"{tokens.min():,}" if tokens.min() == tokens.max() else f"{tokens.min():,} to {tokens.max():,}"
    given = about["settings"]
    return (
        f"{name}; {count} of {span} tokens; window {given['window']}, {given['pooling']}-pooling over {given['kernel']}, "
        f"α = {given['alpha']:g}, ε = {given['epsilon']:g}; {_how(claim, tables)}"
    )


def _how(claim: Claim, tables: Tables) -> str:
    """What is measured, with the run's own budgets."""
    heads = tables[HEADS.name]
    middling = middle(tables)
    budgets = sorted(heads.loc[heads["policy"] == CANDIDATE, "budget"].unique())
    return claim.how.replace(MIDDLE, f"{percent(middling)} cache" if middling else NEAREST).replace(
        BUDGETS, f"{', '.join(map(percent, budgets))} cache" if budgets else "the run's budgets"
    )
