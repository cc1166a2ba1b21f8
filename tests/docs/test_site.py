"""The documentation site builds without a warning, and its links, sizes and requests are in order."""

from __future__ import annotations

import pytest

from support.built_site import build_site, sphinx_is_missing

pytestmark = [pytest.mark.docs, *sphinx_is_missing()]


@pytest.fixture(scope="module")
def site():
    return build_site()


def test_the_site_builds_without_a_warning_or_a_broken_link(site):
    assert site.problems == []


def test_the_root_leads_to_the_newest_version(site):
    assert f"{site.version}/index.html" in (site.root / "index.html").read_text(encoding="utf-8")
