"""Cells in a real kernel: failing commands, progress bars, results and reports, as the tutorials are executed."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.docs
if importlib.util.find_spec("ipykernel") is None or importlib.util.find_spec("nbclient") is None:
    pytestmark = [pytestmark, pytest.mark.skip(reason="needs the dependency group docs")]

WORK = """
from kontrast.training import progress
progress.SECONDS_BETWEEN_LINES = 0.0
with progress.Progress("train", 300) as bar:
    for _ in range(300):
        bar.advance(1, loss=0.5)
"""
RESULT = """
from pathlib import Path
from kontrast.reports.report import ReportPage
from kontrast.runs.predict import PredictResult
display(PredictResult(Path("a.csv"), 3, {"<cat>": 2, "dog": 1}, []))
Path("report.html").write_text("<p>the report</p>")
ReportPage("report.html")
"""


def execute(monkeypatch, folder, *cells):
    """Execute cells one after the other in a new kernel and return the outputs of each."""
    import nbclient
    import nbformat
    from builder.notebook_environment import notebook_environment

    for name, value in notebook_environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    return [cell.outputs for cell in notebook.cells]


def test_a_command_that_fails_ends_the_page(monkeypatch, tmp_path):
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError, match="exit code 2: kontrast pretrain photos"):
        execute(monkeypatch, tmp_path, "!true", "!kontrast pretrain photos --recipe no-such-recipe")


def test_bars_results_and_reports_of_a_kernel(monkeypatch, tmp_path):
    (tmp_path / "work.py").write_text(WORK, encoding="utf-8")
    function, command, result = execute(monkeypatch, tmp_path, WORK, "!python work.py", RESULT)
    (bar,) = function
    assert bar.data["text/plain"].startswith("train 100%") and "<progress" in bar.data["text/html"]
    text = "".join(output.text for output in command)
    assert "train 100%" in text and "\x1b" not in text
    table, page = (output.data["text/html"] for output in result)
    assert "<table" in table and "&lt;cat&gt;" in table
    assert "srcdoc='<p>the report</p>'" in page
