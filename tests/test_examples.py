"""What the documentation shows is true: examples in docstrings and code on pages run, commands are commands, links lead somewhere."""

import doctest
import importlib
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from markdown_it import MarkdownIt
from models import prompt, tiny

import analysis.tasks.registry
import eviction.registry
from analysis.cli.app import app
from hooks import LoadedModel

ROOT = Path(__file__).parent.parent
PACKAGES = ("hooks", "perturbation", "bounds", "eviction", "analysis")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def names(pages):
    return [str(page.relative_to(ROOT)) for page in pages]


def fences(page: Path, language: str) -> list[str]:
    return [part.content for part in MarkdownIt().parse(page.read_text()) if part.type == "fence" and part.info == language]


def modules():
    for package in PACKAGES:
        found = importlib.import_module(package)
        yield found
        yield from (
            importlib.import_module(one.name)
            for one in pkgutil.walk_packages(found.__path__, f"{package}.")
            if not one.name.endswith("_main")
        )


def examples():
    found = {}
    for module in modules():
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, module.__name__):
            if test.examples:
                found.setdefault((test.filename, test.lineno), test)
    return sorted(found.values(), key=lambda test: test.name)


EXAMPLES = examples()


def test_the_functions_that_one_starts_with_have_an_example():
    wanted = "capture hiding perturbation single_eviction_error theta theta_o_hat audit policy prefill evicting look"
    assert set(wanted.split()) <= {test.name.rpartition(".")[2] for test in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_an_example_in_a_docstring_says_what_comes_out(example):
    assert not any(doctest.SKIP in one.options for one in example.examples), "an example that is not run says nothing"
    example.globs |= {"torch": torch, "model": tiny("llama"), "tokens": prompt(48)}
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed, tried = runner.run(example, out=said.append)
    assert failed == 0, "".join(said)
    assert tried


class Tokenizer:
    """A token for every character."""

    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": torch.tensor([[3 + ord(letter) % 90 for letter in text[:200]]])})

    def decode(self, ids, **_):
        return "".join(chr(32 + one) for one in ids)


WITH_CODE = [page for page in PAGES if fences(page, "python")]
# other people's libraries, and models and runs that are not here
ELSEWHERE = ("from kvpress", "pd.read_parquet", "validate(settings")


@pytest.mark.parametrize("page", WITH_CODE, ids=names(WITH_CODE))
def test_code_on_a_page_runs(page, monkeypatch, tmp_path):
    """On a tiny model in place of the one that is named; each page in one namespace, from top to bottom."""
    monkeypatch.chdir(tmp_path)
    loaded = LoadedModel(tiny("llama", num_hidden_layers=16), Tokenizer(), "tiny", "random")
    monkeypatch.setattr("hooks.load", lambda *_, **__: loaded)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: loaded.model)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: loaded.tokenizer)
    torch.manual_seed(0)
    scope = {"model": loaded.model, "tokens": prompt(48), "tokenizer": loaded.tokenizer}
    ran = 0
    try:
        for code in fences(page, "python"):
            compiled = compile(code.replace("max_new_tokens=1000", "max_new_tokens=40"), str(page), "exec")
            if any(word in code for word in ELSEWHERE):
                continue
            exec(compiled, scope)
            ran += 1
    finally:
        for name in re.findall(r'@register\("([^"]+)"', page.read_text()):
            eviction.registry._own.pop(name, None)
            analysis.tasks.registry._own.pop(name, None)
    assert ran or page.name == "claims.md"


def commands(page: Path) -> list[str]:
    """What begins with `criticalkv`: lines of code blocks, and code within text."""
    parts = MarkdownIt().parse(page.read_text())
    blocks = [part.content for part in parts if part.type in ("fence", "code_block")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [child.content for part in parts for child in part.children or () if child.type == "code_inline"]
    words = [shlex.split(line, comments=True) for line in lines if line.strip().startswith("criticalkv ")]
    return list(dict.fromkeys(shlex.join(line) for line in words))


SHOWN = [(page, line) for page in PAGES for line in commands(page)]


def test_there_are_commands_on_pages():
    assert len(SHOWN) > 30


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=[f"{page.relative_to(ROOT)}: {line}" for page, line in SHOWN])
def test_a_command_on_a_page_is_one_with_such_options(page, line):
    words = shlex.split(line)[1:]
    group = typer.main.get_command(app)
    if words[0].startswith("--"):
        assert any(words[0] in parameter.opts for parameter in group.params)
        return
    parent = typer.Context(group, info_name="criticalkv")
    name, command, rest = group.resolve_command(parent, words)
    assert command is not None
    if rest and rest != ["--help"]:  # a bare name is a reference to the command
        command.make_context(
            name, list(rest), parent=parent
        )  # as it parses them: each option is one, and takes what it is given


COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches_by_an_example_that_is_one_and_speaks_json(name):
    command = COMMANDS[name]
    line = re.search(r"Example: \[bold\](.*?)\[/\]", command.help)[1]
    program, used, *rest = shlex.split(line)
    assert (program, used) == ("criticalkv", name)
    command.make_context(name, rest, parent=typer.Context(typer.main.get_command(app)))
    assert "--json" in {option for parameter in command.params for option in parameter.opts}
    assert all(getattr(parameter, "help", None) for parameter in command.params if parameter.name != "help")


def test_a_shell_completes_commands_and_options():
    def completed(*words: str) -> str:
        asked = {"_CRITICALKV_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        program = Path(sys.executable).with_name("criticalkv")
        return subprocess.run([program], env={**os.environ, **asked}, capture_output=True, text=True, check=False).stdout

    assert completed("criticalkv", "val").split() == ["validate"]
    assert {"--budgets", "--budget"} & set(completed("criticalkv", "validate", "--bud").split())


def links(page: Path) -> list[str]:
    parts = [child for part in MarkdownIt().parse(page.read_text()) for child in part.children or ()]
    found = [part.attrGet("href") or part.attrGet("src") for part in parts if part.type in ("link_open", "image")]
    return [link for link in found if link and not link.startswith(("http:", "https:", "#"))]


MADE = tuple(
    f"reference/{name}.md"
    for name in ("commands", "policies", "tables", "hooks", "perturbation", "bounds", "eviction", "analysis")
)
"""Pages that the site makes."""


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_between_pages_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve()
        if str(target).endswith(MADE):
            continue
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{link}: {slugs}"


def test_the_notebooks_are_all_on_the_site():
    nav = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{path.stem}.md" in nav
        assert json.loads(path.read_text())["cells"][0]["source"][0].startswith("# ")
