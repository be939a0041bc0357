"""The documentation as a person sees it: the built site in a real browser, from disk.

Needs `pip install playwright` and Chromium, and is skipped without them.
"""

import os
import shutil
import subprocess
import sys

import pytest
from support.files import ROOT

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PHONE = {"width": 400, "height": 800}
DESKTOP = {"width": 1280, "height": 900}
# What reaches beyond the window and cannot be scrolled to.
CUT = """() => {
    const scrolls = (element) => {
        for (let e = element; e && e !== document.body; e = e.parentElement)
            if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true;
        return false;
    };
    return [...document.querySelectorAll(".md-content *")]
        .filter((e) => e.getBoundingClientRect().width > 0)
        .filter((e) => e.getBoundingClientRect().right > window.innerWidth + 1 && !scrolls(e))
        .map((e) => e.tagName + " " + e.textContent.slice(0, 40));
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        flags = ["--no-sandbox", "--allow-file-access-from-files"]
        browser = started.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


def pages_of(site):
    return sorted(path for path in site.glob("*.html") if path.name != "404.html")


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_no_page_scrolls_sideways_and_nothing_is_cut(site, browser, viewport):
    page = browser.new_page(viewport=viewport)
    for path in pages_of(site):
        page.goto(f"file://{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], path.name
        assert page.evaluate(CUT) == [], path.name


def test_links_and_pictures_load_from_disk(site, browser):
    page = browser.new_page(viewport=DESKTOP)
    for path in pages_of(site):
        page.goto(f"file://{path}")
        broken = page.evaluate(
            "[...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src)"
        )
        assert broken == [], path.name
        links = page.evaluate("[...document.links].map((a) => a.href)")
        for link in links:
            if link.startswith("file://"):
                target = link.removeprefix("file://").partition("#")[0].partition("?")[0]
                assert os.path.exists(target), f"{path.name}: {link}"


@pytest.mark.parametrize("word", ["bootstrapped", "renormalization", "resume"])
def test_search_finds(site, browser, word):
    page = browser.new_page(viewport=DESKTOP)
    page.goto(f"file://{site / 'index.html'}")
    page.fill("input[name=query]", word)
    page.wait_for_selector(".md-search-result__item", timeout=20_000)
    assert word in page.inner_text(".md-search-result__list").lower()


def test_navigation_has_few_groups_that_open(site, browser):
    page = browser.new_page(viewport=DESKTOP)
    page.goto(f"file://{site / 'index.html'}")
    groups = ".md-nav--primary > .md-nav__list > .md-nav__item--nested"
    assert 2 <= page.locator(groups).count() <= 8
    closed = page.locator(f"{groups} >> nth=1")
    inner = closed.locator(".md-nav__item").first
    assert not inner.is_visible()
    closed.locator("label.md-nav__link").first.click()
    inner.wait_for(state="visible")
