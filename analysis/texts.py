"""Reading a user's text file."""

from pathlib import Path

from analysis.errors import InputError


def read_text(option: str, path: Path) -> str:
    """What a file says that `option` names.

    Raises:
        InputError: it is not there, a folder, or no text in UTF-8.
    """
    try:
        if path.is_dir():
            raise InputError(f"{option} {path} is a folder; name the files in it")
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{option} {path} is not text in UTF-8 (byte {error.start} is not)") from error
    except OSError as error:
        raise InputError(f"{option} {path} cannot be read: {error.strerror}") from error
    if "\0" in content:
        raise InputError(f"{option} {path} is not text (it holds NUL bytes)")
    return content
