"""The report: one HTML file that needs nothing beside it."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from analysis.figures.picture import Picture
from analysis.report.tables import LEGEND, behaviour_table, counted, ledger_table, perturbation_table
from analysis.schema import CLAIMS, HEADS, QUERY_SETS, RUNS
from analysis.summary import behaviour_summary, perturbation_summary, violations


def render(tables: Mapping[str, pd.DataFrame], pictures: list[Picture], about: Mapping[str, Any], folder: Path) -> str:
    """The report of a validation as HTML; `about` is the run's `run.json`, `folder` holds the pictures' PNG files.

    Everything that comes from data or file names is escaped.
    """
    heads, runs = tables[HEADS.name], tables[RUNS.name]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    shown = [
        {
            "title": picture.title,
            "reading": picture.reading,
            "data": base64.b64encode((folder / f"{picture.name}.png").read_bytes()).decode(),
        }
        for picture in pictures
    ]
    return environment.get_template("template.html.j2").render(
        **about,
        query_sets=QUERY_SETS,
        legend=LEGEND,
        verdicts=counted(tables[CLAIMS.name]),
        ledger=ledger_table(tables[CLAIMS.name]),
        violations=violations(heads),
        perturbation=perturbation_table(perturbation_summary(heads)),
        behaviour=behaviour_table(behaviour_summary(runs)),
        pictures=shown,
    )
