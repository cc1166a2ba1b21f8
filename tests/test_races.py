"""`benchmarks/all.py` reports and skips races that can't run, and results/races.md agrees with the measured files."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "all.py"


@pytest.fixture(scope="module")
def races():
    spec = importlib.util.spec_from_file_location("benchmarks_all", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_agrees_with_the_measured_files(races):
    found = (ROOT / "results" / "races.md").read_text(encoding="utf-8")
    assert found == races.document(ROOT / "results"), "run python benchmarks/all.py --table"


def test_every_measured_file_is_in_the_table(races):
    text = races.document(ROOT / "results")
    for path in (ROOT / "results" / "races").glob("*.json"):
        assert f"(races/{path.name})" in text
        assert path.stem.removesuffix("-cpu") in races.TITLES


def test_the_page_names_races_not_run_and_absent_libraries(races, tmp_path):
    (tmp_path / "races").mkdir()
    row = {"encoder": "resnet-18", "bare": 100.0, "ours": 90.0, "share": 0.9, "peer": float("nan")}
    (tmp_path / "races" / "training.json").write_text(json.dumps({"device": "D", "rows": [row]}))
    text = races.document(tmp_path)
    assert "| resnet-18 | 100.0 | 90.0 | 0.900 | absent | absent |" in text
    assert (
        text.count("not yet run") == 2 * len(races.TITLES) - 1 - len(races.NEEDS_CUDA) and "needs a CUDA device" in text
    )


def test_a_kernel_race_has_both_ratios(races):
    rows = [
        {"type": "torch.float32", "pairs": 512, "loss": "kontrast", "ms": 4.0, "captured ms": 0.2},
        {"type": "torch.float32", "pairs": 512, "loss": "plain torch", "ms": 3.0, "captured ms": 0.3},
        {"type": "torch.float32", "pairs": 512, "loss": "lightly", "ms": 5.0},
    ]
    made = races.with_ratios("kernels", rows)
    assert [r["times ours"] for r in made] == [1.0, 0.75, 1.25]
    assert made[1]["times ours, captured"] == pytest.approx(1.5)
    assert "times ours, captured" not in made[2]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "absent"), (True, "yes"), (0, "0"), (12345, "12,345"), (12345.6, "12,346"), (0.5, "0.500"),
     (2e-5, "2.0e-05"),
     ("torch.float32", "float32"), (99.96, "100.0"), (0.0, "0")],
)  # fmt: skip
def test_cells_are_formatted_for_people(races, value, text):
    assert races.words(value) == text


def test_a_race_that_fails_keeps_the_earlier_measurement(races, tmp_path, monkeypatch):
    before = tmp_path / "kernels-cpu.json"
    before.write_text("{}")
    monkeypatch.setattr(races, "options", lambda *_: ["--no-such-option"])
    assert "--no-such-option" in races.run_race("kernels", tmp_path, cuda=False, full=False)
    assert before.read_text() == "{}"
    assert "such-race.py" in races.run_race("such-race", tmp_path, cuda=False, full=False)
    assert "CUDA" in races.run_race("family", tmp_path, cuda=False, full=False)


def numbers_in_tables(text: str) -> set[str]:
    """Return the measured numbers of Markdown tables: those with a decimal point or a thousands comma."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return {number for row in rows for number in re.findall(r"(?<![\w.,])\d[\d,]*[.,]\d+(?![\w.])", row)}


def test_measured_figures_are_found_in_tables():
    text = "In words 1.5.\n| batch 512 | 12,952 | 0.979 (seeds) | v0.26.1 | 3 |"
    assert numbers_in_tables(text) == {"12,952", "0.979"}


PAGES = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "promises.md"]
"""docs/promises.md has limits and test sizes, not measurements."""


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_every_measured_figure_traces_to_a_file_in_results(page):
    """Every figure in a table of the README or the docs is in a file that a command wrote to results/, or is a paper's
    own, in the list of the papers' items."""
    made = [*(ROOT / "results").glob("*.md"), ROOT / "docs" / "results.md", ROOT / "src/kontrast/papers/items.toml"]
    known = " ".join(path.read_text(encoding="utf-8") for path in made if path.name != "README.md")
    figures = numbers_in_tables((ROOT / page).read_text(encoding="utf-8"))
    strange = sorted(f for f in figures if not re.search(rf"(?<![\d.,]){re.escape(f)}(?!\d)", known))
    assert not strange, f"{page}: no file in results/ has {strange}"


@pytest.mark.slow
def test_a_race_is_run_in_its_own_process(tmp_path):
    command = [sys.executable, str(SCRIPT), "--only", "data", "--results", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    assert "| feed, in memory |" in (tmp_path / "races.md").read_text()
