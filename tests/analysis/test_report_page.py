"""The report as a person meets it: in a browser, on a desktop, on a phone, on paper, by keyboard and screen reader."""

import pytest
import worlds
from browser import DESKTOP, PHONE, inaccessible, needs_chromium, opened

from analysis.claims import CLAIMS as DECLARED
from analysis.claims import ledger
from analysis.report import write_report
from analysis.schema import CLAIMS

pytestmark = needs_chromium
NASTY = 'a <b>"text"</b> & <script>alert(1)</script>'


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    about = {**worlds.ABOUT, "model": {"name": NASTY, "note": "<i>"}, "refused": {"entries": NASTY}}
    tables = worlds.world(True)
    tables[CLAIMS.name] = ledger(tables, about)
    write_report(tables, about, folder)
    return folder / "report.html"


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_is_whole_and_accessible(size, report, tmp_path):
    with opened(report, size) as (page, wrong):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
        pictures = page.evaluate("[...document.images].map(image => [image.complete, image.naturalWidth, image.alt])")
        assert len(pictures) == len(list((report.parent / "figures").glob("*.png"))) > 15
        assert all(complete and width > 300 and alt for complete, width, alt in pictures)
        shot = page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert len(shot) > 100_000  # a blank page has some 10,000 bytes
        assert inaccessible(page) == []
        assert wrong == []


def test_what_comes_from_data_is_text(report):
    with opened(report) as (page, wrong):
        assert NASTY in page.inner_text("h1")
        assert page.locator("script, h1 b, h1 i").count() == 0
        assert NASTY in page.inner_text("#how + dl")
        assert wrong == []


def test_the_ledger_comes_first_and_each_claim_leads_to_its_command_and_back(report):
    with opened(report) as (page, _):
        assert page.locator("h2").first.inner_text().startswith("The ledger")
        ids = page.locator(".ledger tbody th").all_inner_texts()
        assert ids == [claim.id for claim in DECLARED]
        assert not page.locator("#how-C2").is_visible()
        page.click("#claim-C2 a")
        assert page.locator("#how-C2 code").is_visible()  # a closed part opens for its link
        page.click("#how-C2 a")
        assert page.evaluate("location.hash") == "#claim-C2"


def test_the_keyboard_comes_to_the_ledger_first(report):
    with opened(report) as (page, _):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("location.hash") == "#ledger"


def test_on_a_phone_a_claim_is_a_card_with_its_numbers_named(report):
    with opened(report, PHONE) as (page, _):
        row = page.locator("#claim-C2")
        assert row.bounding_box()["width"] <= PHONE[0]
        named = page.evaluate(
            "getComputedStyle(document.querySelector('#claim-C2 td[data-name=measured]'), '::before').content"
        )
        assert "measured" in named
        # still a table to who listens
        assert row.get_attribute("role") == "row"


def test_on_paper_nothing_is_hidden(report):
    with opened(report) as (page, _):
        assert len(page.pdf(format="A4")) > 100_000
        page.emulate_media(media="print")
        assert page.locator("#how-C2 code").is_visible()
        assert not page.locator("nav").is_visible()
