"""The examples in docstrings run and print what they promise."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import kontrast

ROOT = Path(kontrast.__file__).parent
MODULES = sorted(
    ".".join(["kontrast", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(recurse=True)
    failures = attempts = 0
    for test in finder.find(module, name):
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test)
        failures, attempts = failures + result.failed, attempts + result.attempted
    assert attempts and not failures
