"""The documentation as it was built (`make site`): every page comes up whole, on a desktop and on a phone, and asks nothing of the network."""

import functools
import importlib
import inspect
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, needs_chromium, visiting

SITE = Path(__file__).parents[2] / "site"
PAGES = sorted(SITE.rglob("*.html")) if (SITE / "index.html").exists() else []
pytestmark = pytest.mark.skipif(not PAGES, reason="no site: `make site` builds it")


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@needs_chromium
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_page_is_whole(size, address):
    assert len(PAGES) > 25
    with visiting(size) as (page, wrong):
        for path in [one for one in PAGES if one.name != "404.html"]:
            page.goto(f"{address}/{path.relative_to(SITE)}")
            width, screen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert width <= screen, f"{path.name} is {width} wide on a screen of {screen}"
            broken = page.evaluate("[...document.images].filter(one => !one.naturalWidth || !one.alt).map(one => one.src)")
            assert broken == [], path
            text = page.inner_text("article")
            assert len(text.split()) > 20, path
            left = re.findall(r"(?<!\\)\$[^\s$][^$\n]{0,80}\$|\\\(|\\\[|\[bold\]|doctest:", text)
            assert left == [], f"{path}: raw markup {left}"
            assert wrong == [], path


@needs_chromium
def test_mathematics_is_shown_as_such(address):
    with visiting(DESKTOP) as (page, _):
        page.goto(f"{address}/theory.html")
        assert page.locator("math").count() > 200
        assert page.locator("math[display=block]").count() >= 1


def test_what_is_exported_is_explained():
    rooms = ("hooks", "perturbation", "bounds", "eviction", "analysis")
    there = "\n".join((SITE / "reference" / f"{room}.html").read_text() for room in rooms)
    for line in (SITE.parent / "tests" / "public_names.txt").read_text().splitlines():
        package, _, name = line.partition("(")[0].rpartition(".")
        value = getattr(importlib.import_module(package), name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert f'id="{value.__module__}.{name}"' in there, line


@needs_chromium
def test_a_word_is_found(address):
    with visiting(DESKTOP) as (page, wrong):
        page.goto(f"{address}/index.html")
        page.fill("input[data-md-component=search-query]", "dinkelbach")
        page.wait_for_selector(".md-search-result__item", timeout=10_000)
        assert page.locator(".md-search-result__item").count() > 0
        assert wrong == []
