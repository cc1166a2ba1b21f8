"""Test images, and the same views made by torchvision, both from the benchmark."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def bench():
    """benchmarks/views.py as a module: `pictures`, `through_torchvision`."""
    pytest.importorskip("torchvision")
    path = Path(__file__).parents[2] / "benchmarks" / "views.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_views", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
