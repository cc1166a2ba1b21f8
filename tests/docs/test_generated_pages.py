"""The pages that docs/builder writes from the program: complete, and with the program's own numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("sphinx", reason="needs the dependency group docs")

from builder.api_pages import ROOMS, write_api_pages
from builder.command_page import command_page
from builder.docstrings import escape_bars
from builder.measured_rows import NOTHING, measured
from builder.objective_slopes import draw_rows, has_rows, slope_of_batch, slope_per_anchor, turned
from builder.recipe_pages import write_recipe_pages
from builder.versions import write_versions
from builder.weight_pictures import draw

import kontrast
from kontrast.config.recipe_files import recipe_names
from kontrast.objectives import OBJECTIVES

RESULTS = Path(__file__).parents[2] / "results"


def test_slopes_are_those_of_the_formulas():
    """DCL's weights are a softmax over the negatives at 1/tau, and its positive pulls with 1/tau at any cosine."""
    cosine, tau = 0.5, 0.1
    z, _ = draw_rows(32, 128, 0)
    z[1, 1] = turned(z[0, 0], z[1, 1], cosine)
    others = (z[:, 1:] @ z[0, 0]).flatten() / tau
    weight = torch.softmax(others, dim=0).view(2, 31)[1, 0]
    assert slope_per_anchor("dcl", "negative", cosine, 0) == pytest.approx(weight.item() / tau, rel=1e-6)
    assert slope_per_anchor("dcl", "positive", cosine, 0) == pytest.approx(-1 / tau, rel=1e-6)
    assert slope_per_anchor("koleo", "positive", cosine, 0) == pytest.approx(0, abs=1e-9)


def test_slopes_of_losses_of_the_whole_batch_have_the_right_sign():
    assert not has_rows("barlow-twins") and not has_rows("w-mse") and has_rows("cacr")
    assert slope_of_batch("barlow-twins", "positive", 0.5, 0) < -1
    assert slope_of_batch("align-uniform", "negative", 0.9, 0) > 0.1


def test_a_picture_has_both_curves_within_its_frame():
    drawn = draw([-1.0] * 19, [0.0] * 18 + [3.0], "the positive", "a negative")
    assert drawn.count("<polyline") == 2 and "the positive" in drawn
    curves = [part[: part.index('"')] for part in drawn.split('points="')[1:]]
    assert all(0 <= float(point.split(",")[1]) <= 210 for curve in curves for point in curve.split())


def test_results_of_an_objective_are_those_of_the_tables():
    rows = measured("dcl", RESULTS)
    assert "80.17" in rows and "(../results/dcl-batch-sizes.md)" in rows
    assert "77.50" not in rows  # NT-Xent's
    assert measured("koleo", RESULTS) == NOTHING


def test_every_recipe_has_one_row_with_its_command(tmp_path):
    write_recipe_pages(tmp_path)
    text = "\n".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md"))
    for name in recipe_names():
        expected = {"quickstart": "`kontrast pretrain`", "folder": "`kontrast pretrain PHOTOS`"}
        assert text.count(expected.get(name, f"--recipe {name}`")) == 1, name
    assert "CACR table 8; table 2 prints 83.49: 83.39 linear" in text
    assert "[results/dcl-batch-sizes.md](../../results/dcl-batch-sizes.md)" in text


def test_the_page_of_commands_has_every_command_and_option():
    text = command_page()
    for command in ("pretrain", "probe", "embed", "reproduce", "pack"):
        assert f"## {command}\n" in text
    assert "| `--resume` | Continue the run in --out. |" in text
    assert "`--accept-data-change` or `--no-accept-data-change`" in text


def test_the_api_has_every_public_name(tmp_path):
    write_api_pages(tmp_path)
    for room in ROOMS:
        page = (tmp_path / f"{room}.md").read_text(encoding="utf-8")
        for name in getattr(getattr(kontrast, room), "__all__", ["DataError"]):
            assert f"## {name}\n" in page, (room, name)
    functions = (tmp_path / "functions.md").read_text(encoding="utf-8")
    assert all(f"## {name}\n" in functions for name in kontrast.__all__ if name not in {*ROOMS, "objective"} - {"lens"})
    assert "`nt-xent`" in (tmp_path / "objectives.md").read_text(encoding="utf-8")
    assert len(OBJECTIVES) > 20


def test_bars_are_escaped_outside_of_code():
    assert escape_bars("H(X|Y) of `a|b`") == r"H(X\|Y) of `a|b`"


def test_versions_are_sorted_and_the_root_leads_to_the_newest(tmp_path):
    for name in ("0.9.0", "0.10.0", "0.10.0.dev1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text("")
    write_versions(tmp_path, "0.9.0")
    text = (tmp_path / "versions.js").read_text()
    assert text.startswith("window.kontrastVersions = [")
    assert text.index('"0.10.0 (newest)"') < text.index('"0.10.0.dev1"') < text.index('"0.9.0"')
    assert "0.10.0/index.html" in (tmp_path / "index.html").read_text()
