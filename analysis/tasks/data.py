"""Tables that lie somewhere: a JSON, JSONL, CSV or Parquet file, a folder, or a data set on the Hugging Face hub, read by `datasets`."""

import re
from pathlib import Path

import pandas as pd

from analysis.errors import InputError, first_line

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
NAMED = re.compile(r"^(?P<name>[^:@]+)(:(?P<config>[^@]+))?(@(?P<split>.+))?$")


def is_file(name: str) -> bool:
    """Whether a task's name is that of a file of rows."""
    return Path(name).suffix in KINDS


def read(name: str) -> pd.DataFrame:
    """The rows of a file, or of a data set by its name: `owner/name`, `owner/name:config`, `owner/name:config@split`, or a folder.

    Without a split, of several the one called test is taken, or else validation, or the first.

    Raises:
        InputError: it is not there, or cannot be read.
    """
    import datasets
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar, get_logger, is_progress_bar_enabled

    shown, logger = is_progress_bar_enabled(), get_logger()
    level = logger.level
    disable_progress_bar()
    logger.setLevel("CRITICAL")  # what goes wrong is told by the error, once
    try:
        if is_file(name):
            if not Path(name).is_file():
                raise InputError(f"there is no file {name}")
            if not Path(name).stat().st_size:
                raise InputError(f"{name} is empty")
            more = {"delimiter": "\t"} if name.endswith(".tsv") else {}
            found = datasets.load_dataset(KINDS[Path(name).suffix], data_files=name, split="train", **more)
        else:
            parts = NAMED.match(name)
            if parts is None:
                raise InputError(f"{name!r} names no data set: give owner/name, owner/name:config or owner/name:config@split")
            found = datasets.load_dataset(parts["name"], parts["config"], split=parts["split"])
    except InputError:
        raise
    except Exception as error:  # of as many kinds as there are ways to be unreadable
        # datasets wraps what went wrong in an error of its own
        why = first_line(error) + (f" ({first_line(error.__cause__)})" if error.__cause__ else "")
        raise InputError(f"{name} cannot be read: {why}") from error
    finally:
        logger.setLevel(level)
        if shown:
            enable_progress_bar()
    if isinstance(found, datasets.DatasetDict):
        found = found[next((split for split in ("test", "validation") if split in found), next(iter(found)))]
    return found.to_pandas()


def drawn(frame: pd.DataFrame, count: int | None, seed: int) -> pd.DataFrame:
    """`count` rows, or all where there are no more, chosen by the seed; they keep their numbers, and more rows begin with the same."""
    if count is not None and count < len(frame):
        frame = frame.sample(frac=1, random_state=seed).head(count)
    return frame
