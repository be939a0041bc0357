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


@pytest.fixture(scope="module")
def search(site, browser):
    """A function of words: the results of the site's search, best first, as addresses."""
    page = browser.new_page(viewport=DESKTOP)
    page.goto(f"file://{site / 'index.html'}")
    query = page.locator("input[name=query]")

    def find(words):
        for text, state in (("", "detached"), (words, "visible")):
            query.fill(text)
            query.press("End")  # the search listens for keys
            page.wait_for_selector(".md-search-result__item", state=state, timeout=60_000)
        found = page.locator(".md-search-result__item > a")
        return found.evaluate_all("all => all.map(a => a.href)")

    return find


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


@pytest.mark.parametrize(
    "words, right",
    {
        "install": "install",
        "tutorial": "walkthrough",
        "GPU": "install performance",
        "Windows": "install",
        "save model": "train agents python",
        "load a policy": "python agents",
        "custom environment": "bring_your_own",
        "multi-agent": "mappo",
        "POMDP": "ppo choosing",
        "partial observability": "ppo choosing",
        "debug": "questions learning_curves python",
        "NaN": "questions learning_curves",
        "hyperparameter sweep": "sweep",
        "wandb": "train",
        "checkpoint": "train",
        "Atari": "host_environments",
        "learning curve": "learning_curves",
        "resume": "train",
        "seeds": "train",
        "hyperparameters": "sweep",
        "FlashSAC": "sac",
        "action mask": "bring_your_own",
        "citation": "questions",
        "bibtex": "questions",
        "docker": "questions",
        "video": "agents",
        "pretrained": "gallery",
        "learning rate schedule": "fields",
    }.items(),
)
def test_search_finds(search, words, right):
    """The right page is the first or the second one."""
    pages = [result.rpartition("/")[2].partition(".html")[0] for result in search(words)]
    first = list(dict.fromkeys(pages))[:2]
    assert set(first) & set(right.split()), first


def test_navigation_has_tabs(site, browser):
    page = browser.new_page(viewport=DESKTOP)
    page.goto(f"file://{site / 'index.html'}")
    assert 4 <= page.locator(".md-tabs__item").count() <= 6
    page.locator(".md-tabs__link", has_text="Guide").click()
    assert page.url.endswith("train.html")
    page.locator(".md-footer__link--next").click()
    assert page.url.endswith("python.html")
