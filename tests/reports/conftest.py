"""A finished run that all tests of the report share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.made_run import write_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "digits-nt-xent")
