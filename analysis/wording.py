"""How numbers and names are said, on the command line, in figures and in the report alike."""

from collections.abc import Mapping


def percent(value: float) -> str:
    """0.05 as "5 %", to three digits."""
    return f"{100 * value:.3g} %"


def cache_size(budget: float, unit: str = "") -> str:
    """0.05 as "5 %", 512 as "512" and the unit."""
    return percent(budget) if budget <= 1 else f"{budget:g}{unit}"


def label(model: Mapping[str, str]) -> str:
    """A run's model in one line, as `run.json` has it: its name, and what a reader must know of its weights."""
    return f"{model['name']} ({model['note']})" if model["note"] else model["name"]
