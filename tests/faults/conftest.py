"""Faults caused on purpose. `@pytest.mark.fault(5)` names the promise (its row in docs/promises.md) that a test keeps;
`tally("kills", 4)` counts what the test really did. tests/conftest.py adds both up at the end of a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*rows): the promises of docs/promises.md that this test keeps")


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """tally("kills", 4) or tally("fuzz cases", 200): what this test did, for the line at the end of the run."""

    def count(what: str, number: int) -> None:
        request.node.user_properties.append((f"tally {what}", number))

    return count


@pytest.fixture(autouse=True)
def kept_promises(request: pytest.FixtureRequest) -> None:
    for mark in request.node.iter_markers("fault"):
        request.node.user_properties.extend(("fault", row) for row in mark.args)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed stores go to a folder of the test, never to the user's cache."""
    monkeypatch.setenv("KONTRAST_CACHE", str(tmp_path_factory.mktemp("cache")))
