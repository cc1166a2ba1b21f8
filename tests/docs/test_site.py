"""The documentation site builds without a warning, and its links, sizes and requests are in order."""

from __future__ import annotations

import re

import pytest

from support.built_site import ROOT, build_site, sphinx_is_missing

pytestmark = [pytest.mark.docs, *sphinx_is_missing()]


@pytest.fixture(scope="module")
def site():
    return build_site()


def test_the_site_builds_without_a_warning_or_a_broken_link(site):
    assert site.problems == []


def test_the_root_leads_to_the_newest_version(site):
    assert f"{site.version}/index.html" in (site.root / "index.html").read_text(encoding="utf-8")


def test_every_tutorial_was_executed(site):
    """The build fails if a cell raises or a command of a cell fails; here, none was left out."""
    pages = {path.stem for path in (ROOT / "docs" / "tutorials").glob("*.md")} - {"index"}
    assert pages <= set(site.seconds), f"not executed: {sorted(pages - set(site.seconds))}"
    assert all(site.seconds[name] > 0 for name in pages)
    print({name: round(site.seconds[name], 1) for name in sorted(pages)})


def test_no_tutorial_shows_control_characters_or_hundreds_of_lines(site):
    """Progress bars end as one line each, both of functions and of the commands of a cell."""
    for name in sorted(path.stem for path in (site.pages / "tutorials").glob("*.html")):
        page = (site.pages / "tutorials" / f"{name}.html").read_bytes()
        assert b"\x1b" not in page and b"\r" not in page, name
        assert page.count(b"<progress") < 20, name
        outputs = re.findall(rb'<div class="output[^"]*">.*?</pre>', page, re.DOTALL)
        assert all(output.count(b"\n") < 120 for output in outputs), name
