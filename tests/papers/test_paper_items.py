"""docs/papers.md: every item of the papers has a row, and what a row names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kontrast.config.recipe_files import recipe_names
from kontrast.errors import UsageError
from kontrast.objectives import OBJECTIVES
from kontrast.papers.highlights import highlight_row
from kontrast.papers.paper_items import METRICS, PaperItem, item_row, load_items, papers_page, selected
from kontrast.papers.tables import load_table, table_names

REPOSITORY = Path(__file__).parents[2]
ITEMS = load_items()
# The numbered items of each paper; those of JCL's and UniCLR's appendices are letters.
NUMBERED = {
    "DCL": ["Proposition 1", "Proposition 2", "Table 5"],
    "JCL": [*(f"Figure {n}" for n in (1, "2a", "2b", "2c", 3)), "Table 1", "Table 2", "Table 3", "Algorithm 1"],
    "CACR": [
        *(f"Figure {n}" for n in range(1, 11)),
        *(f"Table {n}" for n in range(1, 22)),
        "Algorithm 1",
        "Algorithm 2",
    ],
    "UniCLR": ["Figure 1", "Figure 2a", "Figure 2b", "Table 1", "Table 2", "Table 3", "Algorithm 1", "Proposition 1"],
    "GCL": [
        "Figure 1",
        "Figure 2a",
        "Figure 2b",
        "Figure 2c",
        "Figure 3",
        "Figure 4",
        "Figure 5a",
        "Figure 5b",
        "Table 1",
    ],
}
NUMBERED["JCL"] += [f"Appendix {letter}" for letter in "ABCDE"]
NUMBERED["UniCLR"] += [f"Appendix {letter}" for letter in "ABCDE"]
NUMBERED["CACR"] += ["Algorithm 3"]
NUMBERED["GCL"] += ["Algorithm 1", "Figure 6a", "Figure 6b", "Figure 6c", "Figure A.1", "Figure B.1"]
NUMBERED["GCL"] += ["Figure C.1a", "Figure C.1b", "Figure C.1c", "Figure C.2", "Figure C.3", "Figure C.4"]
NUMBERED["GCL"] += ["Table D.1", "Table D.2", "Table D.3"]


@pytest.mark.parametrize("paper", list(NUMBERED))
def test_every_numbered_item_of_a_paper_has_a_row(paper):
    rows = " | ".join(item.item for item in ITEMS if item.paper == paper)
    assert [name for name in NUMBERED[paper] if not re.search(rf"\b{re.escape(name)}(?![\w.])", rows)] == []


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item.paper}, {item.item}")
def test_what_a_row_names_exists(item):
    assert [name for name in item.objectives if name not in OBJECTIVES] == []
    assert [name for name in item.recipes if name not in recipe_names()] == []
    assert [path for path in item.code if not (REPOSITORY / path).is_file()] == []
    if item.table:
        assert selected(load_table(item.table), item.cells)
    assert item.table or item.not_run, "say why it is not measured"
    assert item.table or item.command or item.code or item.objectives or item.recipes or item.not_run


def test_every_table_of_a_paper_is_on_the_page():
    """The tables of all methods belong to no single paper."""
    of_papers = {name for name in table_names() if load_table(name).paper in NUMBERED}
    assert of_papers == {item.table for item in ITEMS if item.table}
    assert {name for name in table_names() if name not in of_papers} == {"methods-cifar10", "methods-digits"}


def test_every_command_on_the_page_has_known_options():
    """Each is a command of kontrast, and its options are in the command's help."""
    from typer.main import get_command

    from kontrast.cli.main import app

    commands = get_command(app).commands
    for text in [item.command for item in ITEMS if item.command]:
        for command in re.split(r", (?=kontrast )", text):
            _, name, *words = command.split()
            known = {option for parameter in commands[name].params for option in parameter.opts}
            assert [word for word in words if word.startswith("--") and word not in known] == [], command


def test_a_row_counts_the_cells_that_were_run_and_shows_both_numbers():
    row = item_row(PaperItem("CACR", "T", "W", table="cacr-table-2", cells=("regular",)), REPOSITORY / "results")
    assert row[3] == "6 of 6 cells" and re.search(r"cacr-k4 86\.54 / \d\d\.\d\d", row[4])
    empty = item_row(PaperItem("CACR", "T", "W", table="cacr-table-2"), REPOSITORY / "nowhere")
    assert empty[3:] == ["not yet", ""]
    with pytest.raises(UsageError, match="no cell or group"):
        item_row(PaperItem("CACR", "T", "W", table="cacr-table-2", cells=("none",)), REPOSITORY / "results")


def test_an_item_about_another_number_shows_that_number():
    """Not the accuracies of its cells, and not the paper's numbers, which are accuracies too."""
    row = item_row(
        PaperItem("CACR", "T", "W", table="cacr-table-2", cells=("regular",), metric="conditional_entropy"),
        REPOSITORY / "results",
    )
    assert re.fullmatch(r"conditional entropy: (\S+ \d\.\d{3}(; )?){6}", row[4])
    cost = item_row(
        PaperItem("JCL", "T", "W", table="jcl-moco", cells=("jcl",), metric="seconds"), REPOSITORY / "results"
    )
    assert re.fullmatch(r"seconds: jcl \d+", cost[4])
    absent = PaperItem("GCL", "T", "W", table="cacr-table-2", cells=("regular",), metric="training_loss")
    assert item_row(absent, REPOSITORY / "results")[3:] == ["not yet", ""]


def test_items_about_losses_entropies_and_costs_show_no_accuracies():
    found = {(item.paper, item.item): item.metric for item in ITEMS}
    for paper, name, metric in (
        ("CACR", "Figure 3", "conditional_entropy"), ("CACR", "Figure 5", "conditional_entropy"),
        ("DCL", "Proposition 1 (A.1)", "multiplier"), ("JCL", "Figure 3", "positive_cosine"),
        ("JCL", "Appendix B", "seconds"), ("GCL", "Figure 3", "projection_distance"),
        ("GCL", "Figure C.2", "training_loss"),
    ):  # fmt: skip
        assert found[paper, name] == metric
    assert {item.metric for item in ITEMS} <= {"", *METRICS}


def test_the_committed_page_is_up_to_date():
    text = (REPOSITORY / "docs" / "papers.md").read_text(encoding="utf-8")
    assert text == papers_page(REPOSITORY / "results"), "run kontrast reproduce --docs"


def test_parts_of_a_highlight_without_runs_are_left_out(tmp_path):
    row = {"table": "gcl-figure-6", "title": "T", "what": "W", "text": "old: {averaged-0.2-0}; new: {no-such-cell}"}
    with pytest.raises(UsageError, match="no-such-cell"):
        highlight_row(row, REPOSITORY / "results")
    row["text"] = "old: {averaged-0.2-0}, {untrained-0}; new: {untrained-0}"
    assert highlight_row(row, REPOSITORY / "results")[1].startswith("old: 73.56, ")
    assert highlight_row(row, tmp_path) == []
