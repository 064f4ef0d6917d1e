"""What users may import stays as it is: names, parameters and defaults of every package, against the list in `public_names.txt`.

A change that is meant is written into that list (`python -m tests.test_public_names`) and told in the changelog.
"""

import importlib
import inspect
from pathlib import Path

LISTED = Path(__file__).with_name("public_names.txt")
PACKAGES = (
    "hooks", "perturbation", "bounds", "eviction", "analysis.schema", "analysis.claims", "analysis.figures", "analysis.tasks",
    "analysis.statistics", "analysis.report",
)  # fmt: skip


def public() -> list[str]:
    lines = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", package) == package and not inspect.ismodule(value)
        ]
        lines += [f"{package}.{name}{_taken(getattr(module, name))}" for name in sorted(names)]
    return lines


def _taken(value: object) -> str:
    """Parameters and defaults of what can be called, without annotations."""
    if not callable(value) or (not inspect.isroutine(value) and not inspect.isclass(value)):
        return ""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return "(…)"
    parts = [
        parameter.replace(annotation=inspect.Parameter.empty, default=parameter.default)
        for parameter in signature.parameters.values()
    ]
    plain = str(signature.replace(parameters=parts, return_annotation=inspect.Signature.empty))
    return plain if " at 0x" not in plain else "(…)"


def test_what_is_exported_is_what_is_listed():
    assert public() == LISTED.read_text(encoding="utf-8").splitlines()


def test_every_exported_name_says_what_it_is():
    for line in public():
        name = line.partition("(")[0]
        package, _, last = name.rpartition(".")
        value = getattr(importlib.import_module(package), last)
        if inspect.isroutine(value) or inspect.isclass(value):
            assert inspect.getdoc(value), name


if __name__ == "__main__":
    LISTED.write_text("\n".join(public()) + "\n", encoding="utf-8")
