"""The documentation site builds without a warning, and its links, sizes and requests are in order."""

from __future__ import annotations

import importlib.util

import pytest

from support.built_site import build_site

pytestmark = pytest.mark.docs
if importlib.util.find_spec("sphinx") is None:
    pytestmark = [pytestmark, pytest.mark.skip(reason="needs the dependency group docs")]


@pytest.fixture(scope="module")
def site():
    return build_site()


def test_the_site_builds_without_a_warning_or_a_broken_link(site):
    assert site.problems == []


def test_the_root_leads_to_the_newest_version(site):
    assert f"{site.version}/index.html" in (site.root / "index.html").read_text(encoding="utf-8")
