"""The run's folder: nothing half-written, and a run that was stopped goes on where it was.

While a run is under way its folder holds only `.progress`, with the rows of each finished context. Tables, figures and
report are written there too and moved out at the end, when all are whole.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.errors import InputError
from analysis.schema import TABLES

PROGRESS = ".progress"


class RunFolder:
    """One run's output folder.

    Raises:
        InputError: the folder cannot be written, or holds something other than the same run's progress.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self.progress = path / PROGRESS
        self._made: list[Path] = []
        mark = self.progress / "fingerprint"
        try:
            self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
            if path.exists() and not path.is_dir():
                raise InputError(f"--out {path} is a file; name a folder")
            held = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
            if held and PROGRESS not in held:
                raise InputError(f"--out {path} is not empty (it holds {held[0]}); name a new folder")
            if held and (not mark.is_file() or mark.read_text() != fingerprint):
                raise InputError(
                    f"--out {path} holds an unfinished run with other settings or versions; give those again to go on, or a new folder"
                )
            self.progress.mkdir(parents=True, exist_ok=True)
            mark.write_text(fingerprint)
        except OSError as error:
            with suppress(OSError):
                self.abandon()
            raise InputError(f"--out {path} cannot be written: {error.strerror}") from error

    def abandon(self) -> None:
        """Take back what was made, as long as no context is finished."""
        if any(self.progress.glob("context-*")):
            return
        shutil.rmtree(self.progress, ignore_errors=True)
        for folder in self._made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def finished(self, number: int) -> tuple[dict[str, pd.DataFrame], dict[str, Any]] | None:
        """The tables and notes of context `number`, if an earlier start finished it."""
        folder = self.progress / f"context-{number:04d}"
        if not folder.is_dir():
            return None
        tables = {table.name: table.read(folder / table.file) for table in TABLES}
        return tables, json.loads((folder / "notes.json").read_text())

    def finish(self, number: int, tables: Mapping[str, pd.DataFrame], notes: Mapping[str, Any]) -> None:
        """Keep a finished context: written aside, then moved into place in one step."""
        aside = self.progress / f"writing-{number:04d}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for table in TABLES:
            table.write(tables[table.name], aside / table.file, {})
        (aside / "notes.json").write_text(json.dumps(notes))
        aside.rename(self.progress / f"context-{number:04d}")

    def staging(self) -> Path:
        """An empty folder for the final files."""
        staging = self.progress / "final"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        return staging

    def publish(self, staging: Path) -> None:
        """Move the final files out and forget the progress.

        Should it be stopped in between, the progress is still there, and the next start makes and moves them again.
        """
        for entry in sorted(staging.iterdir()):
            target = self.path / entry.name
            if target.is_dir():
                shutil.rmtree(target)
            entry.replace(target)
        shutil.rmtree(self.progress)
