"""The report of a run: figures, one HTML file, one Markdown file; made at its end, or again from its folder."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.claims import ledger
from analysis.comparison import rows
from analysis.errors import InputError, first_line
from analysis.figures.gallery import gallery
from analysis.report.render import markdown, render
from analysis.schema import CLAIMS, SAMPLES, TABLES
from analysis.wording import label


def write_report(tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any], folder: Path) -> None:
    """Write `figures/` (PNG and SVG), `report.html` and `report.md` into `folder`.

    Args:
        tables: a run's tables by name, the ledger among them.
        about: its `run.json`.
        folder: where; files of these names are overwritten.
    """
    pictures = gallery(tables, label(about["model"]))
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    for picture in pictures:
        picture.save(figures)
    (folder / "report.html").write_text(render(tables, pictures, about, figures), encoding="utf-8")
    (folder / "report.md").write_text(markdown(tables, pictures, about), encoding="utf-8")


def read_validation(folder: Path) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """A finished validation's tables by name, and its `run.json`.

    Raises:
        InputError: there is none in the folder, or a file of it is missing or damaged.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise InputError(f"{folder} holds no run.json; give the folder of a validation that came to its end")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    wanted = [*TABLES, *([SAMPLES] if (folder / SAMPLES.file).exists() else [])]
    tables = {table.name: rows(table, folder / table.file) for table in wanted}
    if not isinstance(about, dict) or not {"model", "settings", "provenance", "selfcheck"} <= set(about):
        raise InputError(f"{folder / 'run.json'} is not that of a validation")
    return tables, about


def remake(folder: Path) -> dict[str, pd.DataFrame]:
    """Make the ledger, the figures and the report again from the run's rows; its tables.

    Raises:
        InputError: as `read_validation`, or the folder cannot be written.
    """
    tables, about = read_validation(folder)
    tables[CLAIMS.name] = ledger(tables, about)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as aside:
            made = Path(aside)
            CLAIMS.write(tables[CLAIMS.name], made / CLAIMS.file, about["model"])
            write_report(tables, about, made)
            (folder / "figures").mkdir(exist_ok=True)
            for path in sorted(made.rglob("*.*")):
                path.replace(folder / path.relative_to(made))
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from error
    return tables
