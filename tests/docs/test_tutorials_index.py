"""The tutorials are all there, listed once in the index, and begin as CONTRIBUTING.md says; none is executed here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted(path.stem for path in TUTORIALS.glob("*.md") if path.stem != "index")
TASKS = [
    "your-own-photos", "which-objective", "compare-fairly", "audit-for-shortcuts", "continue-from-weights",
    "few-labels", "search-and-duplicates", "image-and-text", "detection", "a-cluster", "a-loss-of-your-own",
    "losses-in-your-own-loop", "losses-in-lightning", "losses-in-hugging-face-trainer",
]  # fmt: skip
ELSEWHERE = re.compile(r"https?://|from_pretrained\(|(?:timm|hf):\w")
"""What would ask another host if it were executed."""


def text_of(name: str) -> str:
    return (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")


def cells_of(name: str) -> list[str]:
    return re.findall(r"^```\{code-cell\}.*?\n(.*?)^```$", text_of(name), re.MULTILINE | re.DOTALL)


def test_every_task_has_a_tutorial():
    assert set(TASKS) <= set(PAGES)


def test_the_index_lists_every_tutorial():
    table, contents = text_of("index").split("```{toctree}")
    assert sorted(re.findall(r"\]\(([\w-]+)\.md\)", table)) == PAGES
    assert sorted(re.findall(r"^([\w-]+)$", contents, re.MULTILINE)) == PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_begins_with_what_the_reader_will_have(name):
    """It is the first sentence, below the title; and there is something to execute."""
    assert re.search(r"^---\n\n# [^\n]+\n\nAt the end of this page you (have|can|know) ", text_of(name), re.MULTILINE)
    assert len(cells_of(name)) >= 3


@pytest.mark.parametrize("name", sorted(set(PAGES) - {"a-first-loss"}))
def test_a_tutorial_says_what_to_change_for_real_work_and_asks_no_host(name):
    assert re.search(r"^## (For real work|Many nodes|What can go wrong)$", text_of(name), re.MULTILINE)
    assert [cell for cell in cells_of(name) if ELSEWHERE.search(cell)] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_has_a_description(name):
    for cell in cells_of(name):
        if "matplotlib" in cell or "plt." in cell:
            assert re.search(r"^    alt: \w", cell, re.MULTILINE), f"a figure without alt in {name}:\n{cell}"


def test_the_time_of_every_tutorial_was_measured():
    rows = json.loads((ROOT / "results" / "tutorials.json").read_text(encoding="utf-8"))
    page = (ROOT / "results" / "tutorials.md").read_text(encoding="utf-8")
    assert sorted(rows) == PAGES
    for name, row in rows.items():
        assert f"[{name}](../docs/tutorials/{name}.md) | {row['processor_seconds']} | {row['seconds']} |" in page
