"""Settings for all tests: one thread, skips with a reason, and a count of the promises that were tested."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # for child processes too: two threads that compete for one core are slow

import pytest
import torch

torch.set_num_threads(1)
PROMISES = Path(__file__).parents[1] / "docs" / "promises.md"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA device; there is none here")
    chromium = shutil.which("chromium") and shutil.which("chromedriver")
    browser = None if chromium else pytest.mark.skip(reason="needs chromium and chromedriver; they are not installed")
    for item in items:
        for name, skip in (("gpu", gpu), ("browser", browser)):
            if skip and item.get_closest_marker(name):
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter) -> None:
    """Print how many promises, kills and fuzz cases were tested, as recorded by tests/faults/conftest.py.

    This hook is not in tests/faults/ because with `-n auto` the main process collects no tests and never reads the
    conftest files of folders.
    """
    promises, counts = set(), Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "fault":
                promises.add(value)
            elif name.startswith("tally "):
                counts[name.removeprefix("tally ")] += value
    if promises:
        did = "".join(f", {number} {what}" for what, number in sorted(counts.items()))
        total = len(re.findall(r"^\| \d+ \|", PROMISES.read_text(), re.MULTILINE))
        kept = f"faults: {len(promises)} of {total} promises kept by a test that causes the fault"
        terminalreporter.write_line(kept + did)
