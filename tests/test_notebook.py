"""What Jupyter shows of results, reports and progress. IPython is not installed here: a recorder takes its place."""

from __future__ import annotations

import html
import importlib
import io
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest

import kontrast
from kontrast.notebook import LARGEST_INLINE, Printed, html_of_page, html_of_text, is_terminal
from kontrast.probes.result import ProbeResult
from kontrast.reports.report import ReportPage
from kontrast.runs.duplicates import DuplicateGroup, Duplicates
from kontrast.runs.predict import PredictResult
from kontrast.runs.probe import ProbeResults
from kontrast.studies.study_result import Comparison
from kontrast.training import progress
from kontrast.training.progress import PackingBar, Progress

NOT_TABLES = {"BadImage", "Changes", "Explanation"}
"""Classes with a `__str__` of their own that is a sentence or a docstring."""


def words(page: str) -> list[str]:
    return html.unescape(re.sub(r"<[^>]*>", " ", page)).split()


def probes() -> ProbeResults:
    shares = {"trained": 0.9, "untrained": 0.5, "pixels": 0.4}
    knn = [ProbeResult("knn", share, 0.0, 1.0, 10, {}, features=name) for name, share in shares.items()]
    tuned = [ProbeResult("finetune", 0.95, 0.0, 1.0, 10, {}, features="trained")]
    return ProbeResults((*knn, *tuned), Path("runs/digits"))


def comparison() -> Comparison:
    columns, note = ["recipe", *(f"number {i}" for i in range(12))], "A note."
    table = {"title": "Accuracy", "columns": columns, "rows": [["dcl", *("0.900 to 0.950",) * 12]], "note": note}
    return Comparison(Path("comparison.json"), "DCL is better.", [table], [], [], [], [])


RESULTS = {
    "probes": probes,
    "one probe": lambda: probes()[0],
    "comparison": comparison,
    "predictions": lambda: PredictResult(Path("a.csv"), 3, {"cat": 2, "dog": 1}, []),
    "duplicates": lambda: Duplicates((DuplicateGroup(0.99, ["a.jpg", "b.jpg"]),), Path("runs/digits"), 0.98),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_appears_with_the_words_that_it_prints(name):
    result = RESULTS[name]()
    assert words(result._repr_html_()) == str(result).split()


def test_numbers_stand_below_the_features_that_they_belong_to():
    """Fine-tuning has no number for the untrained encoder and pixels, so its row has two empty cells."""
    rows = re.findall(r"<tr>(.*)</tr>", probes()._repr_html_())
    cells = [[words(cell) for cell in re.findall(r"<td[^>]*>([^<]*)</td>", row)] for row in rows]
    assert cells[0] == [["accuracy"], ["trained"], ["untrained"], ["pixels"]]
    assert cells[-1] == [["finetune"], ["0.950"], [], []]


def test_a_table_is_not_broken_at_the_width_of_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert len(comparison().lines(60)) > len(comparison().lines())
    assert comparison()._repr_html_().count("<tr>") == 2


def test_names_are_escaped_and_stay_in_their_row():
    hostile = Duplicates((DuplicateGroup(1.0, ["<script>alert(1)</script>", "a&b.png"]),), Path("x"), 0.9)
    page = hostile._repr_html_()
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "a&amp;b.png" in page
    assert html_of_text("name  1\nlonger name  2\nlens  runs/a/lens.json").count("<tr>") == 3


def test_every_class_that_prints_a_table_appears_as_one():
    for module in pkgutil.walk_packages(kontrast.__path__, "kontrast."):
        room = module.name.split(".")[1]
        if room not in ("probes", "runs", "studies", "papers"):
            continue
        for name, one in vars(importlib.import_module(module.name)).items():
            if isinstance(one, type) and one.__module__ == module.name and "__str__" in vars(one):
                assert name in NOT_TABLES or issubclass(one, Printed), f"{module.name}.{name} has no table for Jupyter"


def test_a_small_report_is_part_of_the_notebook_and_a_large_one_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ReportPage("the report.html")
    assert page == Path("the report.html") and page._repr_html_() == ""
    page.write_text("""<p title="a" lang='en'>&amp; ü &quot;</p>""", encoding="utf-8")
    shown = page._repr_html_()
    assert html.unescape(re.search(r"srcdoc='([^']*)'", shown)[1]) == page.read_text(encoding="utf-8")
    assert 'sandbox="allow-scripts"' in shown  # a page that others wrote has no access to the notebook
    page.write_text("x" * (LARGEST_INLINE + 1), encoding="utf-8")
    assert 'src="the%20report.html"' in html_of_page(page) and len(html_of_page(page)) < 500


def test_a_run_appears_with_its_report(tmp_path, monkeypatch):
    (tmp_path / "recipe.toml").write_text("", encoding="utf-8")
    (tmp_path / "run.json").write_text('{"data": {"name": "<b>"}}', encoding="utf-8")
    run = kontrast.Run(tmp_path)
    assert "&lt;b&gt;" in run._repr_html_() and "iframe" not in run._repr_html_()
    (tmp_path / "report.html").write_text("<p>the report</p>", encoding="utf-8")
    assert "the report" in run._repr_html_()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Recorder:
    """Takes the place of IPython's DisplayHandle, and of the page: what was displayed, and how often it changed."""

    shown: list[Recorder] = []

    def __init__(self) -> None:
        self.content, self.changes = {}, 0

    def display(self, content, raw):
        assert raw and self not in Recorder.shown
        Recorder.shown.append(self)
        self.content = content

    def update(self, content, raw):
        assert raw and self in Recorder.shown
        self.content, self.changes = content, self.changes + 1


@pytest.fixture
def kernel(monkeypatch):
    """A process that runs the cells of a notebook."""
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    display.DisplayHandle = Recorder
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(Recorder, "shown", [])
    return Recorder.shown


def test_a_bar_in_jupyter_is_one_line_that_changes(kernel, capsys):
    with Progress("<train>", 1000) as bar:
        for _ in range(1000):
            bar.advance(1, loss=0.5)
    (line,) = kernel
    assert line.content["text/plain"].startswith("<train> 100%  0 s  loss 0.500")
    assert "&lt;train&gt; 100%" in line.content["text/html"] and 'value="1000" max="1000"' in line.content["text/html"]
    assert 1 <= line.changes < 100, "each change is a message to the browser"
    assert capsys.readouterr() == ("", "")


def test_a_silent_bar_shows_nothing_in_jupyter(kernel):
    with Progress("probe", 10, silent=True) as bar:
        bar.advance(10)
    with PackingBar("pack"), Progress("nothing is done", 10):
        pass
    assert kernel == []


def test_a_command_of_a_cell_moves_no_cursor(monkeypatch):
    """`!kontrast ...` writes to a pseudoterminal whose output stays in the page."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    for parent, moves in (("1", False), (None, True)):
        stream = Terminal()
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("JPY_PARENT_PID", "1") if parent else monkeypatch.delenv("JPY_PARENT_PID", raising=False)
        assert is_terminal(stream) == moves
        with Progress("train", 2) as bar:
            bar.advance(2)
        assert ("\x1b" in stream.getvalue()) == moves and "train" in stream.getvalue()
