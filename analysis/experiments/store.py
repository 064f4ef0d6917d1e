"""A run's rows while it is under way: one SQLite file, a row committed whole or not at all, whatever stops the run."""

import fcntl
import json
import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from analysis.errors import InputError

FILE = "cells.sqlite"
LOCK = ".lock"


class Rows:
    """What a run's file says. Made by `Store` or `Reading`."""

    _base: sqlite3.Connection

    def done(self) -> set[str]:
        """The cells that have a row."""
        return {cell for (cell,) in self._base.execute("SELECT id FROM cells WHERE row IS NOT NULL")}

    def rows(self, cells: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """The rows of those cells that have one, in the order asked for; None: of all, in the order in which they came."""
        found = self._base.execute("SELECT id, row FROM cells WHERE row IS NOT NULL ORDER BY at, rowid")
        held = dict(found)
        return [{**json.loads(held[cell]), "cell": cell} for cell in (held if cells is None else cells) if cell in held]

    def failures(self) -> dict[str, str]:
        """The cells that could not be computed, and why."""
        return dict(self._base.execute("SELECT id, error FROM cells WHERE error IS NOT NULL"))

    def tries(self) -> dict[str, int]:
        """How often each cell was computed to its end."""
        return dict(self._base.execute("SELECT id, tries FROM cells"))

    def times(self, last: int) -> list[float]:
        """When the last so many rows came, in seconds since 1970, ascending."""
        found = self._base.execute("SELECT at FROM cells WHERE row IS NOT NULL ORDER BY at DESC LIMIT ?", (last,))
        return sorted(at for (at,) in found)

    def notes(self, prefix: str = "") -> dict[str, Any]:
        """What was kept about the run, under names that begin so."""
        found = self._base.execute("SELECT name, value FROM notes ORDER BY rowid")
        return {name: json.loads(value) for name, value in found if name.startswith(prefix)}


class Store(Rows):
    """The cells of a run's folder, for one writer at a time; a context manager.

    Raises:
        InputError: the folder cannot be written, holds something else, is in use by another run, or its file is damaged.
    """

    def __init__(self, folder: Path, made_by: str = "criticalkv") -> None:
        self.folder = folder
        try:
            if folder.exists() and not folder.is_dir():
                raise InputError(f"--out {folder} is a file; name a folder")
            held = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
            if held and FILE not in held and held != [LOCK]:
                raise InputError(f"--out {folder} is not empty and holds no run (it holds {held[0]}); name a new folder")
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / LOCK).open("w")
        except OSError as error:
            raise InputError(f"--out {folder} cannot be written: {error.strerror}") from error
        if not self._locked():
            self._lock.close()
            raise InputError(f"--out {folder} is in use by another run; wait for it, or name another folder")
        try:
            self._open()
        except BaseException:
            self._lock.close()
            raise

    def _locked(self) -> bool:
        for _ in range(10):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(0.05)  # who only looks holds it for a moment
            else:
                return True
        return False

    def _open(self) -> None:
        path = self.folder / FILE
        try:
            self._base = sqlite3.connect(path, isolation_level=None)
            # each commit is on the disk before the next begins
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.execute(
                "CREATE TABLE IF NOT EXISTS cells (id TEXT PRIMARY KEY, row TEXT, error TEXT, tries INTEGER NOT NULL DEFAULT 1, at REAL)"
            )
            self._base.execute("CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        except sqlite3.Error as error:
            raise InputError(f"{path} cannot be used: {error}") from error

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file and of the folder."""
        self._base.close()
        self._lock.close()

    def put(self, cell: str, row: Mapping[str, Any]) -> None:
        """Keep a cell's row; it is on the disk when this returns.

        Raises:
            InputError: the disk does not take it; what was kept before is still there.
        """
        self._write(
            "INSERT INTO cells (id, row, at) VALUES (?, ?, ?) "
            "ON CONFLICT(id) DO UPDATE SET row=excluded.row, error=NULL, tries=tries+1, at=excluded.at",
            (cell, json.dumps(row, ensure_ascii=False), time.time()),
        )

    def fail(self, cell: str, error: str) -> None:
        """Note that a cell could not be computed, and why."""
        self._write(
            "INSERT INTO cells (id, error, at) VALUES (?, ?, ?) "
            "ON CONFLICT(id) DO UPDATE SET error=excluded.error, tries=tries+1, at=excluded.at",
            (cell, error, time.time()),
        )

    def note(self, name: str, value: Any) -> None:
        """Keep something about the run."""
        self._write(
            "INSERT INTO notes VALUES (?, ?) ON CONFLICT(name) DO UPDATE SET value=excluded.value", (name, json.dumps(value))
        )

    def _write(self, statement: str, values: tuple[Any, ...]) -> None:
        try:
            self._base.execute(statement, values)
        except sqlite3.Error as error:
            raise InputError(
                f"{self.folder / FILE} cannot be written ({error}); what was finished is kept: make room, and give the same command again"
            ) from error


class Reading(Rows):
    """A run's cells as they are now, read beside whatever writes them; a context manager.

    Raises:
        InputError: the folder holds no run, or its file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / FILE
        if not path.is_file():
            raise InputError(f"{folder} holds no run: it has no {FILE}")
        try:
            self._base = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, isolation_level=None)
            self._base.execute("SELECT count(*) FROM cells").fetchone()
        except sqlite3.Error as error:
            raise InputError(f"{path} cannot be read: {error}") from error

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._base.close()

    def writes(self) -> bool:
        """Whether a run writes to the folder now."""
        try:
            with (self.folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False
