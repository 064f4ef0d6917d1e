"""A headless Chromium for the tests of pages: Debian's package, or whichever is on the path."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def _starting(name: str) -> str | None:
    """Its path, if it is there and runs: some distributions have a stand-in that only says where to get it."""
    found = shutil.which(name)
    return found if found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0 else None


CHROMIUM = next(filter(None, map(_starting, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
DESKTOP, PHONE = (1280, 900), (390, 844)
LOCAL = ("file:", "data:", "blob:", "http://127.0.0.1:")


@contextmanager
def visiting(size: tuple[int, int] = DESKTOP) -> Iterator[tuple[Any, list[str]]]:
    """A window, and what went wrong in it so far: errors on the console, requests that failed or left the machine."""
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": size[0], "height": size[1]})
            page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("requestfailed", lambda asked: wrong.append(f"failed: {asked.url[:200]}"))
            page.on("request", lambda asked: None if asked.url.startswith(LOCAL) else wrong.append(asked.url))
            yield page, wrong
        finally:
            browser.close()


@contextmanager
def opened(path: Path, size: tuple[int, int] = DESKTOP) -> Iterator[tuple[Any, list[str]]]:
    """The page of a file in such a window."""
    with visiting(size) as (page, wrong):
        page.goto(path.as_uri())
        yield page, wrong


def inaccessible(page: Any) -> list[str]:
    """What axe-core finds against WCAG 2.1 A and AA and its best practices, with the first element of each."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}" for one in found]
