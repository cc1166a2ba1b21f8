"""Faults caused on purpose.

`@pytest.mark.fault(5)` names the promise that a test checks, by its row in docs/promises.md. `tally("kills", 4)` counts
what a test did. tests/conftest.py prints the sums at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*rows): the promises of docs/promises.md whose fault this test causes")


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """tally("kills", 4) or tally("fuzz cases", 200): count what this test did."""

    def count(what: str, number: int) -> None:
        request.node.user_properties.append((f"tally {what}", number))

    return count


@pytest.fixture(autouse=True)
def record_promises(request: pytest.FixtureRequest) -> None:
    for mark in request.node.iter_markers("fault"):
        request.node.user_properties.extend(("fault", row) for row in mark.args)


@pytest.fixture(autouse=True)
def temporary_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put packed stores into a temporary folder, never into the user's cache."""
    monkeypatch.setenv("KONTRAST_CACHE", str(tmp_path_factory.mktemp("cache")))
