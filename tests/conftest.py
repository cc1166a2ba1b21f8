"""Shared by all tests: one torch thread (two contended ones run small work many times slower), honest skips, and the
count of the faults that were caused (tests/faults/conftest.py records them)."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA device; there is none here")
    chromium = shutil.which("chromium") and shutil.which("chromedriver")
    browser = None if chromium else pytest.mark.skip(reason="needs chromium and chromedriver; they are not installed")
    for item in items:
        for name, skip in (("gpu", gpu), ("browser", browser)):
            if skip and item.get_closest_marker(name):
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter) -> None:
    """One line: promises kept, kills survived, fuzz cases tried. It stands here since the process that starts others
    (-n auto) collects no tests and so never reads the conftest of a folder below."""
    faults, counts = set(), Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "fault":
                faults.add(value)
            elif name.startswith("tally "):
                counts[name.removeprefix("tally ")] += value
    if faults:
        did = "".join(f", {number} {what}" for what, number in sorted(counts.items()))
        terminalreporter.write_line(f"faults: {len(faults)} of 40 promises kept by a test that causes the fault{did}")
