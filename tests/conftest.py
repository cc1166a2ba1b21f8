"""Shared by all tests: one torch thread (two contended ones run small work many times slower), and honest skips."""

from __future__ import annotations

import shutil

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
