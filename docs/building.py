"""What mkdocs cannot do by itself: pages that are made (home, notebooks, commands, policies, tables), and mathematics as MathML.

A hook of mkdocs (`mkdocs.yml` names it). `executed` is also what the tests run the notebooks by.
"""

import hashlib
import importlib
import importlib.metadata
import inspect
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("hooks", "perturbation", "bounds", "eviction", "analysis")
BELOW = ("torch", "transformers", "numpy", "pandas", "matplotlib", "seaborn")
PARTS = ("schema", "claims", "figures", "tasks", "statistics", "report")
RUNS = ROOT / "build" / "notebooks"
"""Notebooks that were executed, by what they depend on."""


def executed(path: Path, kept: Path = RUNS) -> nbformat.NotebookNode:
    """A notebook with its outputs; run only where neither it nor the packages have been run as they are.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    digest = hashlib.sha256(path.read_bytes())
    digest.update(repr([sys.version, *(importlib.metadata.version(name) for name in BELOW)]).encode())
    for source in sorted(file for package in PACKAGES for kind in ("*.py", "*.j2") for file in (ROOT / package).rglob(kind)):
        digest.update(source.read_bytes())
    target = kept / f"{path.stem}-{digest.hexdigest()[:16]}.ipynb"
    if not target.exists():
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
        kept.mkdir(parents=True, exist_ok=True)
        partly = target.with_suffix(".part")
        nbformat.write(notebook, partly)
        partly.replace(target)
    return nbformat.read(target, as_version=4)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    for name, content in pages().items():
        files.append(File.generated(config, name, content=content))
    return files


def pages() -> dict[str, str | bytes]:
    """Every made page and picture, by its path in the site."""
    made: dict[str, str | bytes] = {
        "index.md": _moved(ROOT / "README.md"),
        "CONTRIBUTING.md": _moved(ROOT / "CONTRIBUTING.md"),
        "CHANGELOG.md": _moved(ROOT / "CHANGELOG.md"),
        "reference/commands.md": _commands(),
        "reference/policies.md": _policies(),
        "reference/tables.md": _tables(),
        **{f"reference/{room}.md": _room(room) for room in PACKAGES[:-1]},
        "reference/analysis.md": "# analysis\n\n" + "\n\n".join(_room(f"analysis.{part}", "##") for part in PARTS),
    }
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        made |= _notebook(path)
    return made


def on_page_content(html: str, **_: Any) -> str:
    """Mathematics that every browser shows by itself."""
    from latex2mathml.converter import convert

    def mathml(found: re.Match[str]) -> str:
        opened, tex = found[1], unescape(found[2])
        return convert(" ".join(tex.split()), display="block" if opened == "\\[" else "inline")

    return re.sub(r'<(?:span|div) class="arithmatex">(\\[(\[])(.*?)\\[)\]]</(?:span|div)>', mathml, html, flags=re.DOTALL)


def _moved(path: Path) -> str:
    """A page of the repository's root, with its links as they are from the site's."""
    return path.read_text(encoding="utf-8").replace("](docs/", "](")


def _notebook(path: Path) -> dict[str, str | bytes]:
    from nbconvert import MarkdownExporter

    notebook = executed(path)
    for cell in notebook.cells:  # a progress bar is no result
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    text, resources = MarkdownExporter().from_notebook_node(notebook)
    # what a notebook draws is told by the words before it
    text = re.sub(r"!\[[^\]]*\]\(", f"![drawn by the cell above]({path.stem}_", text)
    text = re.sub(r"<style scoped>.*?</style>", "", text, flags=re.DOTALL)
    text = text.replace(' border="1" class="dataframe"', "")  # the theme's own tables, which scroll where they are wide
    title, _, rest = text.lstrip().partition("\n")
    note = f"*Executed from `notebooks/{path.name}`; `make lab` opens it.*"
    pictures = {f"notebooks/{path.stem}_{name}": data for name, data in resources["outputs"].items()}
    return {f"notebooks/{path.stem}.md": f"{title}\n\n{note}\n{rest}", **pictures}


def _commands() -> str:
    """The command line, from its own help."""
    import typer
    from typer.cli import get_docs_for_click

    from analysis.cli.app import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="criticalkv")
    text = get_docs_for_click(obj=command, ctx=context, name="criticalkv", title="The command line")
    for name, one in command.commands.items():  # click cuts its summaries short
        text = re.sub(rf"^\* `{name}`: .*$", f"* `{name}`: {(one.help or '').partition(chr(10))[0]}", text, flags=re.MULTILINE)
    return re.sub(r"\[bold\](.*?)\[/\]", r"`\1`", text)


def _policies() -> str:
    """Every policy, from the registry."""
    from eviction.registry import describe, listed, names

    lines = [
        "# Policies",
        "",
        "A policy accumulates scores, allocates the budget, and selects entries. Every selection goes with every base. "
        "`criticalkv explain NAME` says the same in a terminal.",
        "",
        "| policy | allocates by | selects by | looks at | source |",
        "|---|---|---|---|---|",
    ]
    for one in map(describe, listed()):
        kinds = {verb: kind for verb, kind, *_ in one.verbs}
        lines.append(f"| `{one.name}` | {kinds['allocate']} | {kinds['select']} | {one.queries} | {one.source} |")
    parts: dict[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {}
    for one in map(describe, names()):
        parts |= {kind: (f"{verb}s by", text, parameters) for verb, kind, text, _, parameters in one.verbs}
    for kind, (verb, text, parameters) in parts.items():
        lines += ["", f"## {kind}", "", f"*{verb}*", "", text]
        lines += ["", *(f"- `{name}` = `{default}`" for name, default in parameters)]
    return "\n".join(lines)


def _room(name: str, heading: str = "#") -> str:
    """What a package exports, from the docstrings: each object where it is defined, since a function may be called like its module."""
    package = importlib.import_module(name)
    shown = getattr(package, "__all__", [one for one in vars(package) if not one.startswith("_")])
    objects = {one: getattr(package, one) for one in sorted(shown, key=str.lower)}
    lines = [f"{heading} {name}", "", inspect.getdoc(package) or ""]
    for one, value in objects.items():
        home = getattr(value, "__module__", "")
        if callable(value) and home.partition(".")[0] in PACKAGES and home.startswith(name.partition(".")[0]):
            lines += ["", f"::: {home}.{one}", f"    options: {{ heading_level: {len(heading) + 1} }}"]
    return "\n".join(lines)


def _tables() -> str:
    """The columns of every table, from the schema."""
    from analysis.schema import CLAIMS, SAMPLES, SCORES, TABLES

    lines = [
        "# Tables",
        "",
        "What every column of a run's Parquet files means, as `analysis.schema` declares it. Keys are in bold.",
    ]
    for table in (*TABLES, CLAIMS, SAMPLES, SCORES):
        lines += ["", f"## {table.file}", "", "| column | type | meaning |", "|---|---|---|"]
        for column in table.columns:
            name = f"**`{column.name}`**" if column.key else f"`{column.name}`"
            lines.append(f"| {name} | {column.kind} | {column.meaning.replace('|', '&#124;')} |")
    return "\n".join(lines)
