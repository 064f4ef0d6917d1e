"""The report's pages: one HTML file that needs nothing beside it, and one Markdown file beside the figures."""

import base64
import re
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
    shown = [
        {
            "title": picture.title,
            "reading": picture.reading,
            "data": base64.b64encode((folder / f"{picture.name}.png").read_bytes()).decode(),
        }
        for picture in pictures
    ]
    return _environment(autoescape=True).get_template("template.html.j2").render(**_content(tables, about), pictures=shown)


def markdown(tables: Mapping[str, pd.DataFrame], pictures: list[Picture], about: Mapping[str, Any]) -> str:
    """The same as Markdown, its figures by their file names; what comes from data or file names is shown as it is, never as markup."""
    environment = _environment(autoescape=False)
    environment.filters["plain"] = plain
    return environment.get_template("template.md.j2").render(**_content(tables, about), pictures=pictures)


def plain(text: object) -> str:
    """Text in which nothing is Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(str(text).split()))


def _environment(*, autoescape: bool) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("analysis.report", "."),
        autoescape=autoescape,  # noqa: S701 - Markdown escapes by a filter of its own
        undefined=jinja2.StrictUndefined,
        trim_blocks=not autoescape,
        lstrip_blocks=not autoescape,
    )


def _content(tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> dict[str, Any]:
    """What both pages show."""
    heads, claims = tables[HEADS.name], tables[CLAIMS.name]
    return {
        **about,
        "query_sets": QUERY_SETS,
        "legend": LEGEND,
        "verdicts": counted(claims),
        "ledger": ledger_table(claims),
        "details": claims[["id", "setting", "command"]],
        "violations": violations(heads),
        "perturbation": perturbation_table(perturbation_summary(heads)),
        "behaviour": behaviour_table(behaviour_summary(tables[RUNS.name])),
    }
