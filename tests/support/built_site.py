"""The documentation site, built once per test session."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import kontrast

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class BuiltSite:
    """A site, what its build complained about, and the seconds that each tutorial took."""

    root: Path
    problems: list[str]
    seconds: dict[str, float]
    version: str = kontrast.__version__

    @property
    def pages(self) -> Path:
        """The folder of this version's pages."""
        return self.root / self.version


def sphinx_is_missing() -> list[pytest.MarkDecorator]:
    """Return the mark that skips tests of the site if the dependency group docs is not installed."""
    missing = importlib.util.find_spec("sphinx") is None
    return [pytest.mark.skip(reason="needs the dependency group docs")] * missing


@functools.cache
def build_site() -> BuiltSite:
    """Build the site as the command does, into a temporary folder that is removed at exit."""
    folder = tempfile.mkdtemp(prefix="kontrast-site-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    root, work = Path(folder) / "site", Path(folder) / "work"
    command = [sys.executable, str(ROOT / "docs" / "build.py"), "--out", str(root), "--work", str(work)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    lines = done.stderr.splitlines() or ["the build failed without a message"]
    seconds = {
        name: float(number) for name, number in re.findall(r"^(.+): executed in (.+) s$", done.stdout, re.MULTILINE)
    }
    return BuiltSite(
        root, [] if done.returncode == 0 else [line for line in lines if "IPKernelApp" not in line], seconds
    )
