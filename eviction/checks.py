"""Parameters of a policy are checked when it is made."""

import math


def at_least(name: str, value: float, least: float) -> None:
    """Raises ValueError unless `value` is a finite number of at least `least`."""
    if isinstance(value, str) or not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} must be a finite number of at least {least}, not {value}")


def whole(name: str, value: int, least: int) -> None:
    """Raises ValueError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def share(name: str, value: float) -> None:
    """Raises ValueError unless `value` lies in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} lies in [0, 1], not at {value}")


def one_of(name: str, value: object, *allowed: object) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def odd(name: str, value: int) -> None:
    """Raises ValueError unless `value` is an odd number of at least 1."""
    whole(name, value, 1)
    if value % 2 == 0:
        raise ValueError(f"{name} must be an odd number of at least 1, not {value}")
