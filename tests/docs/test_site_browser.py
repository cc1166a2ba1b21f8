"""The built site in a real browser, opened from files: both themes, a phone and a screen, search, versions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builder.versions import write_versions

from support.browser import open_browser, set_screen, until
from support.built_site import build_site, sphinx_is_missing

pytestmark = [pytest.mark.docs, pytest.mark.browser, *sphinx_is_missing()]
LOOKED_AT = [
    "index",
    "getting-started",
    "tutorials/index",
    "concepts/law",
    "objectives/cacr",
    "results/index",
    "promises",
]
LOOKED_AT += [f"reference/{name}" for name in ("commands", "api/functions", "recipes/cifar10")]
TOO_WIDE = """
const room = document.documentElement.clientWidth;
const scrolls = (node) => {
  for (let up = node.parentElement; up; up = up.parentElement) {
    if (['auto', 'scroll'].includes(getComputedStyle(up).overflowX)) return true;
  }
  return false;
};
return [...document.querySelectorAll('main *')]
  .filter((node) => node.getClientRects().length && !scrolls(node) && node.getBoundingClientRect().right > room + 1)
  .map((node) => node.outerHTML.slice(0, 120));
"""
"""Elements of the content that reach beyond the screen, outside of anything that scrolls by itself."""
LEAST_CONTRAST = """
const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
const light = (color) => {
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = color.slice(0, 3).map((v) => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const background = (node) => {
  for (let up = node; up; up = up.parentElement) {
    const color = parse(getComputedStyle(up).backgroundColor);
    if (color.length === 3 || color[3] === 1) return color;
  }
  return [255, 255, 255];
};
let worst = [21, ''];
const texts = ['p', 'a', 'code', 'td', 'th', 'li', 'h2', 'svg text', 'figcaption'].map((name) => `main ${name}`);
for (const node of document.querySelectorAll(texts.join())) {
  if (!node.getClientRects().length || !node.textContent.trim()) continue;
  const style = getComputedStyle(node);
  const drawn = node.namespaceURI.endsWith('svg') ? style.fill : style.color;
  let ground = background(node);
  const point = node.closest('.point');
  if (point) ground = parse(getComputedStyle(point.querySelector('circle:not(.grip)')).fill);
  const [a, b] = [light(parse(drawn)), light(ground)];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < worst[0]) worst = [contrast, node.outerHTML.slice(0, 160)];
}
return worst;
"""


@pytest.fixture(scope="module")
def site() -> Any:
    built = build_site()
    assert built.problems == []
    return built


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


def show(browser: Any, page: Path, width: int, scheme: str = "light") -> None:
    set_screen(browser, width, scheme)
    browser.get(page.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_page_can_be_read_in_both_themes(site, browser, name, scheme):
    show(browser, site.pages / f"{name}.html", 1280, scheme)
    assert browser.execute_script("return document.documentElement.dataset.theme") == scheme
    contrast, where = browser.execute_script(LEAST_CONTRAST)
    assert contrast >= 4.5, (name, scheme, contrast, where)
    assert browser.execute_script(TOO_WIDE) == []
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [url for url in loaded if not url.startswith(("file:", "data:"))] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_no_page_is_wider_than_a_phone(site, browser):
    set_screen(browser, 390)
    pages = [page for page in sorted(site.pages.rglob("*.html")) if "_modules" not in page.parts]
    assert len(pages) > 100
    wide = {}
    for page in pages:
        browser.get(page.as_uri())
        if found := browser.execute_script(TOO_WIDE):
            wide[page.relative_to(site.pages).as_posix()] = found[:2]
    assert wide == {}


def test_the_search_finds_temperature_without_a_server(site, browser):
    show(browser, site.pages / "index.html", 1280)
    browser.get((site.pages / "search.html").as_uri() + "?q=temperature")
    summary = until(
        lambda: re.search(r"found (\d+) page", browser.find_element("id", "search-results").text), "the search"
    )
    links = [link.get_attribute("href") for link in browser.find_elements("css selector", "#search-results li a")]
    assert int(summary[1]) > 10
    assert any("concepts/law.html" in link for link in links)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_menu_leads_to_another_version_without_a_server(site, browser):
    older = site.root / "0.0.1"
    older.mkdir()
    (older / "index.html").write_text("<title>old</title>", encoding="utf-8")
    write_versions(site.root, site.version)
    show(browser, site.pages / "concepts" / "law.html", 1280)
    browser.find_element("css selector", ".versions summary").click()
    links = {link.text: link for link in browser.find_elements("css selector", ".versions[open] li a")}
    assert set(links) == {f"{site.version} (newest)", "0.0.1"}
    links["0.0.1"].click()
    assert until(lambda: browser.title == "old", "the other version")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_playground_runs_on_its_page_and_fits_its_frame(site, browser, width):
    show(browser, site.pages / "concepts" / "law.html", width, "dark")
    assert until(lambda: browser.find_elements("css selector", "#playground .controls"), "the playground")
    assert "attraction" in browser.find_element("css selector", "#playground .numbers").text
    for name in ("cacr", "jcl", "nt-xent"):
        browser.find_element("css selector", f"#playground option[value='{name}']").click()
        assert browser.execute_script("const root = document.getElementById('playground');"
                                      "return root.scrollWidth <= root.clientWidth"), (name, width)  # fmt: skip


def test_without_scripts_the_playground_is_a_picture_with_a_sentence(site):
    text = (site.pages / "concepts" / "law.html").read_text(encoding="utf-8")
    (inside,) = re.findall(r'<div id="playground".*?</div>', text, re.DOTALL)
    assert "<svg" in inside and "needs JavaScript" in inside
