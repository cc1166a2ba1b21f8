"""The figures of a reproduced table: what is drawn, and where."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as tree

import pytest

from kontrast.papers import line_chart as chart
from kontrast.papers.figures import draw_figures
from kontrast.papers.result_pages import CURVES, NUMBERS
from kontrast.papers.tables import load_table

SVG = "{http://www.w3.org/2000/svg}"


def run_of(accuracy: float, seed: int = 0, **curves):
    probes = {name: {"accuracy": accuracy} for name in ("linear", "knn")}
    return {"seed": seed, "probes": probes, "numbers": {}, "curves": curves}


def shapes(text: str, kind: str):
    return list(tree.fromstring(text).iter(f"{SVG}{kind}"))


def test_points_are_at_the_position_of_their_numbers():
    text = chart.line_chart("T", "x", [chart.Line("a", [(0, 0.0), (10, 100.0), (5, 50.0)])], exact=True)
    places = [(float(c.get("cx")), float(c.get("cy"))) for c in shapes(text, "circle")]
    bottom, right = chart.HEIGHT - chart.BOTTOM, chart.WIDTH - chart.RIGHT
    middle = (chart.LEFT + right) / 2, (chart.TOP + bottom) / 2
    assert places == [(chart.LEFT, bottom), (right, chart.TOP), middle]


def test_values_that_double_are_equally_spaced():
    line = chart.Line("a", [(32 * 2**n, 1.0 + n) for n in range(5)])
    places = [float(c.get("cx")) for c in shapes(chart.line_chart("T", "batch", [line], exact=True), "circle")]
    steps = [b - a for a, b in itertools.pairwise(places)]
    assert max(steps) - min(steps) < 0.2


def test_numbers_below_the_axis_do_not_overlap():
    line = chart.Line("a", [(x, x) for x in (0.0, 0.2, 1.0, 2.0, 10.0)])
    shown = [t.text for t in shapes(chart.line_chart("T", "x", [line], exact=True), "text") if t.get("y") == "367"]
    assert shown == ["0", "1", "2", "10"], "0.2 is too close to 0"


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-2.0, 5.0], [1e-6, 2e-6], [51.4, 79.53], [0.144, 0.999]])
def test_ticks_enclose_the_values_and_are_few_and_round(values):
    axis = chart.round_axis(values)
    assert axis.low <= min(values) and max(values) <= axis.high and 2 <= len(axis.ticks) <= 9
    assert all(0 <= axis.position(value) <= 1 for value in values)
    assert all(float(f"{tick:.2g}") == pytest.approx(tick) for tick in axis.ticks)


def test_text_is_escaped_and_long_legends_fit():
    lines = [chart.Line(f"{n}: a < b & " + "words " * 20, [(0, n), (1, 2 * n)]) for n in range(20)]
    text = chart.line_chart('<T> & "U"', "x", lines)
    root = tree.fromstring(text)
    assert root.find(f"{SVG}title").text == '<T> & "U"'
    assert all(float(t.get("y")) <= float(root.get("height")) for t in root.iter(f"{SVG}text"))
    styles = {(p.get("stroke"), p.get("stroke-dasharray")) for p in root.iter(f"{SVG}path") if p.get("stroke-width")}
    assert len(styles) == 20, "all lines look different"


def test_sweeps_are_drawn_with_the_numbers_of_the_paper():
    table = load_table("gcl-mnist")
    found = draw_figures(table, lambda cell: [run_of(0.5), run_of(0.7, seed=1)], CURVES, NUMBERS)
    assert set(found) == {"gcl-mnist-bits.svg"}
    text = found["gcl-mnist-bits.svg"]
    assert len(shapes(text, "circle")) == len(table.cells) and "dashed" in text
    assert len(re.findall(r'stroke-dasharray="6 4"', text)) == 3  # the autoencoders have no numbers in the paper
    heights = {c.get("cy") for c in shapes(text, "circle")}
    assert len(heights) == 1, "the mean of the seeds"


def test_curves_are_drawn_by_epoch_for_cells_that_were_run():
    table = load_table("uniclr-figure-2")
    curve = [(10, 0.5), (20, 0.6)]
    found = draw_figures(table, lambda c: [run_of(0.5, knn=curve)] if c.name != "trace" else [], CURVES, NUMBERS)
    assert set(found) == {"uniclr-figure-2-knn.svg"}
    text = found["uniclr-figure-2-knn.svg"]
    assert "without either" in text
    assert len([p for p in shapes(text, "path") if p.get("fill") == "none"]) == len(table.cells) - 1
    assert draw_figures(table, lambda cell: [], CURVES, NUMBERS) == {}
    assert draw_figures(table, lambda cell: [run_of(0.5, knn=curve[:1])], CURVES, NUMBERS) == {}, (
        "one point does not make a curve"
    )


def test_entropy_is_drawn_for_each_group_below_its_limit():
    """CACR's figures 3 and 5: the methods on one set of images, at a common t- and at each method's own."""
    table = load_table("cacr-table-2")
    curves = {"conditional_entropy": [(10, 4.0), (20, 5.0)], "conditional_entropy_own": [(10, 5.0), (20, 5.2)]}
    drawn = {name: CURVES[name] for name in table.curves}
    found = draw_figures(table, lambda c: [run_of(0.5, **curves)] if c.group != "table-11" else [], drawn, NUMBERS)
    groups = set(table.groups) - {"table-11"}
    names = {f"cacr-table-2-{curve.replace('_', '-')}-{group}.svg" for curve in curves for group in groups}
    assert set(found) == names
    text = found["cacr-table-2-conditional-entropy-own-linear.svg"]
    assert "Linear label imbalance" in text and "ln(255)" in text
    lines = [p for p in shapes(text, "path") if p.get("fill") == "none"]
    assert len(lines) == 6 + 1, "six methods and the limit"


def test_histograms_are_drawn_as_densities_of_each_group():
    table = load_table("jcl-moco")
    wide, narrow = [(0.1, 0.5), (0.3, 0.5)], [(0.05, 0.25), (0.15, 0.25), (0.25, 0.25), (0.35, 0.25)]
    drawn = {"moco": wide, "jcl": narrow, "lambda-1": narrow}
    found = draw_figures(
        table,
        lambda c: [run_of(0.5, cosine_histogram=drawn[c.run_as])] if c.run_as in drawn else [],
        CURVES,
        NUMBERS,
    )
    counts = {}
    for group in ("methods", "lambda"):
        text = found[f"jcl-moco-cosine-{group}.svg"]
        lines = [p.get("d") for p in shapes(text, "path") if p.get("fill") == "none"]
        heights = {place.split(" ")[1] for line in lines for place in line[1:].split("L")}
        assert len(heights) == 1, "the same uniform density"
        counts[group] = len(lines)
    assert counts == {"methods": 2, "lambda": 2}, "the method itself is in each sweep"
    assert set(found) & {f"jcl-moco-cosine-{group}.svg" for group in ("keys", "tau")} == set(), "nothing of their own"
    assert not [name for name in found if "variance" in name]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("jcl-moco", ["m", "tau", "lambda"]),
        ("gcl-figure-3", ["tau", "lambda"]),
        ("cacr-ablations", ["t-plus", "t-minus"]),
        ("cacr-figure-8", ["images-per-batch"]),
    ],
)
def test_every_sweep_has_a_file(name, files):
    table = load_table(name)
    run = {**run_of(0.5), "probes": {table.main: {"accuracy": 0.5}}}
    found = draw_figures(table, lambda cell: [run], CURVES, NUMBERS)
    assert set(found) == {f"{name}-{file}.svg" for file in files}


def test_every_measured_number_of_a_sweep_has_a_figure():
    """Digit accuracy and training loss (GCL, figures 5 and C.2) beside class accuracy."""
    run = {**run_of(0.5), "numbers": {"added_feature": 0.25, "training_loss": 3.0}}
    found = draw_figures(load_table("gcl-figure-5"), lambda cell: [run], CURVES, NUMBERS)
    assert set(found) == {f"gcl-figure-5-digits{end}.svg" for end in ("", "-added-feature", "-training-loss")}
    titles = [tree.fromstring(text).find(f"{SVG}title").text for text in found.values()]
    assert titles == [
        "Accuracy by digits, linear",
        "Linear accuracy of the added feature by digits",
        "Training loss by digits",
    ]
    cells = {"repulsion": 1.5}
    bits = draw_figures(load_table("gcl-figure-b1"), lambda c: [{**run_of(0.5), "numbers": cells}], CURVES, NUMBERS)
    assert set(bits) == {"gcl-figure-b1-bits.svg"}, "the main number"
