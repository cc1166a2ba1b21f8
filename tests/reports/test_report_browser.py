"""report.html in a real browser: no console errors, every picture loads, points react to pointer, touch and keys."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kontrast.reports import curves, report

from support.browser import open_browser, set_screen, until
from support.made_run import CLASSES, write_run

pytestmark = pytest.mark.browser
ARTEFACTS = Path(__file__).parents[2] / "artefacts"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


def visit(browser: Any, page: Path, width: int = 1280, scheme: str = "light") -> None:
    """Open the page at this width and color scheme, and wait until it is built."""
    set_screen(browser, width, scheme)
    browser.get(page.as_uri())
    until(lambda: browser.execute_script("return document.documentElement.dataset.ready === 'yes'"), "the page")
    until(lambda: browser.execute_script("return document.querySelectorAll('.plots svg').length > 0"), "the plots")


def check(browser: Any) -> None:
    """Check that the console is empty, every picture has loaded and nothing is wider than the screen."""
    assert browser.get_log("browser") == []
    broken = "return [...document.images].filter((i) => !i.complete || i.naturalWidth === 0).length"
    assert browser.execute_script(broken) == 0
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert not browser.execute_script("return document.body.innerText.match(/undefined|NaN|\\[object /)")


def picture(browser: Any, name: str, whole: bool = True) -> None:
    ARTEFACTS.mkdir(exist_ok=True)
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole})
    (ARTEFACTS / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


@pytest.fixture(scope="module")
def page(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report([finished_run], tmp_path_factory.mktemp("page") / "one.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_section_is_shown(browser, page, width, scheme):
    visit(browser, page, width, scheme)
    check(browser)
    count = lambda selector: len(browser.find_elements("css selector", selector))  # noqa: E731
    assert count(".plots svg") == 6
    assert count(".map circle.point") == 1000
    assert count(".query") == 12
    assert count(".query img") == 12 * 9
    assert count(".near .right .badge") + count(".near .wrong .badge") == 12 * 8
    assert count(".bars tr") == 6
    assert "36.7 points" in browser.find_element("css selector", ".verdict").text
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(253, 253, 252)" if scheme == "light" else "rgb(20, 22, 25)")
    picture(browser, f"report-{width}-{scheme}")


def test_hovering_shows_the_image_and_its_name(browser, page):
    from selenium.webdriver.common.action_chains import ActionChains

    visit(browser, page)
    browser.execute_script("document.querySelector('.map svg').scrollIntoView({block: 'center'})")
    preview = browser.find_element("css selector", ".map .preview")
    assert not preview.is_displayed()
    ActionChains(browser).move_to_element(browser.find_elements("css selector", ".map circle.point")[300]).perform()
    until(preview.is_displayed, "the preview")
    name = preview.find_element("css selector", ".quiet").text
    digit = int(name.split("/")[1])
    assert preview.find_element("tag name", "b").text == CLASSES[digit]
    assert browser.execute_script("return arguments[0].querySelector('img').naturalWidth", preview) == 32
    picture(browser, "report-hover", whole=False)
    curve = browser.find_element("css selector", ".plots svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", curve)
    ActionChains(browser).move_to_element(curve).perform()
    tip = browser.find_element("css selector", ".plots .tip")
    until(tip.is_displayed, "the read-out")
    assert "epoch" in tip.text
    check(browser)


def test_keys_and_touch_show_the_image(browser, page):
    visit(browser, page, 390)
    svg = browser.find_element("css selector", ".map svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", svg)
    preview = browser.find_element("css selector", ".map .preview")
    svg.send_keys("\ue014")  # arrow right
    until(preview.is_displayed, "the preview")
    first = preview.text
    svg.send_keys("\ue014")
    assert until(lambda: preview.text != first and preview.text, "the next image")
    svg.send_keys("\ue00c")  # escape
    assert not preview.is_displayed()
    place = "const r = document.querySelectorAll('.map .point')[40].getBoundingClientRect(); return [r.x + 2, r.y + 2]"
    x, y = browser.execute_script(place)
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    until(preview.is_displayed, "the preview by touch")
    check(browser)


def test_classes_are_highlighted_and_points_become_pictures(browser, page):
    visit(browser, page)
    muted = lambda: len(browser.find_elements("css selector", ".map .muted"))  # noqa: E731
    click = "document.querySelectorAll(arguments[0])[arguments[1]].click()"
    assert muted() == 0
    browser.execute_script(click, ".side .legend button", 3)
    members = int(browser.find_elements("css selector", ".side .legend small")[3].text)
    assert muted() == 1000 - members
    browser.execute_script(click, ".map .actions button", 0)
    assert len(browser.find_elements("css selector", ".map image")) == 1000
    check(browser)


def test_csv_downloads_contain_no_formulas(browser, finished_run, tmp_path):
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    gallery = json.loads((run / "gallery.json").read_text())
    gallery["points"][0]["name"], gallery["points"][1]["name"] = '=HYPERLINK("x")', "-2+3"
    (run / "gallery.json").write_text(json.dumps(gallery))
    visit(browser, report([run], tmp_path / "page.html"))
    folder = tmp_path / "down"
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    browser.execute_script("document.querySelector('.map .csv').click()")
    saved = until(lambda: list(folder.glob("*.csv")), "the download")[0]
    rows = saved.read_text("utf-8").splitlines()
    assert rows[0] == "name,class,x,y"
    assert rows[1].startswith('"\'=HYPERLINK(""x"")",')
    assert rows[2].startswith("'-2+3,")
    assert float(rows[3].split(",")[2]) == gallery["points"][2]["x"]
    check(browser)


def test_hostile_names_are_shown_and_not_run(browser, finished_run, tmp_path):
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    evil = "</script><img src=x onerror=document.title='broken'>\u2028\udcff"
    gallery = json.loads((run / "gallery.json").read_text())
    gallery["classes"] = [f"{evil}{i}" for i in range(10)]
    for entry in [*gallery["points"], *gallery["queries"]]:
        entry["name"] = evil
    (run / "gallery.json").write_text(json.dumps(gallery))
    (run / "recipe.toml").write_text(evil.replace("\udcff", ""), "utf-8")
    visit(browser, report([run], tmp_path / "page.html"))
    check(browser)
    assert "broken" not in browser.title
    assert "</script><img" in browser.find_element("css selector", "pre").text
    assert "onerror" in browser.find_element("css selector", ".side .legend button").text


def many_classes(run: Path) -> None:
    gallery = json.loads((run / "gallery.json").read_text())
    gallery["classes"] = [f"kind {i:03d}" for i in range(120)]
    for number, point in enumerate(gallery["points"]):
        point["label"] = 12 * point["label"] + number % 12
    (run / "gallery.json").write_text(json.dumps(gallery))


def only_metrics(run: Path) -> None:
    for path in run.iterdir():
        if path.name != "metrics.jsonl":
            path.unlink()
    (run / "metrics.jsonl").write_text('{"step": 1, "epoch": 1, "loss": 5.0}\n{"step": 2, "epo')


@pytest.mark.parametrize("change", [many_classes, only_metrics])
def test_unusual_runs(browser, finished_run, tmp_path, change):
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    change(run)
    for width in (1280, 360):
        visit(browser, report([run], tmp_path / "page.html"), width)
        check(browser)
    picture(browser, f"report-{change.__name__.replace('_', '-')}")


def test_several_runs_long_runs_and_runs_without_labels(browser, finished_run, tmp_path):
    other = write_run(tmp_path / "long", epochs=1000, objective="cacr", end=0.91, seed=1, pictures=finished_run)
    page = report([finished_run, other], tmp_path / "page.html")
    assert page.stat().st_size < 5_000_000
    for width, scheme in ((1280, "light"), (390, "dark")):
        visit(browser, page, width, scheme)
        check(browser)
        assert len(browser.find_elements("css selector", ".map svg")) == 2
        assert len(browser.find_elements("css selector", "#table tbody tr")) == 2
        picture(browser, f"report-two-runs-{width}-{scheme}")
    flat = write_run(tmp_path / "flat", labelled=False, pictures=finished_run)
    visit(browser, report([flat], page), 1280)
    check(browser)
    assert len(browser.find_elements("css selector", ".map image")) == 1000
    assert browser.find_elements("css selector", ".badge, .bars, .side") == []
    picture(browser, "report-unlabelled")


LABELS = """
const boxes = [...document.querySelectorAll('#training text.halo')].map((t) => [t.textContent, t.getBBox()]);
const lines = [...document.querySelectorAll('#training line.reference')].map((l) => +l.getAttribute('y1'));
const struck = boxes.filter(([_, b]) => lines.some((y) => y > b.y && y < b.y + b.height)).map(([text]) => text);
return [boxes.sort((a, b) => a[1].y - b[1].y).map(([text]) => text), struck];
"""


@pytest.mark.parametrize(("pixels", "untrained"), [(0.469, 0.439), (0.421, 0.42), (0.84, 0.83), (0.02, 0.01)])
def test_no_dashed_line_crosses_a_label(browser, finished_run, tmp_path, pixels, untrained):
    run = with_controls(finished_run, tmp_path, pixels, untrained)
    for width in (1280, 500):
        visit(browser, report([run], tmp_path / "page.html"), width)
        labels, struck = browser.execute_script(LABELS)
        assert [label.rpartition(" ")[0] for label in labels] == ["raw pixels", "untrained encoder"]
        assert struck == []
        check(browser)
    if pixels == 0.469:
        picture(browser, "report-close-references")


def test_labels_of_close_lines_do_not_overlap(browser, finished_run, tmp_path):
    run = with_controls(finished_run, tmp_path, pixels=0.42, untrained=0.421)
    visit(browser, report([run], tmp_path / "page.html"), 390)
    tops = browser.execute_script(
        "return [...document.querySelectorAll('#training text.halo')].map((t) => +t.getAttribute('y'))"
    )
    assert len(tops) == 2 and abs(tops[0] - tops[1]) >= 13
    check(browser)


def with_controls(finished_run: Path, place: Path, pixels: float, untrained: float) -> Path:
    """Copy the run with these accuracies of its controls, which are dashed lines in the kNN plot."""
    run = Path(shutil.copytree(finished_run, place / "run"))
    tree = json.loads((run / "probes.json").read_text())
    for probe in tree["probes"]:
        probe["accuracy"] = {"pixels": pixels, "untrained": untrained}.get(probe["features"], probe["accuracy"])
    (run / "probes.json").write_text(json.dumps(tree))
    return run


def test_python_and_javascript_round_the_same_way(browser, page):
    """The page shows the same number in a sentence (Python) and in a table (JavaScript)."""
    visit(browser, page)
    for value in (0.5625, 0.0625, 0.00125, 0.9375, 0.8625, 0.1, 1 / 3, 1.005):
        assert browser.execute_script("return formatPercent(arguments[0])", value) == curves.percent(value)
    for value in (12344.5, 12345.5, -12344.5, 10000.4999, 56250.5, 1234567.5):
        assert browser.execute_script("return formatNumber(arguments[0])", value) == curves.number(value)
    assert browser.execute_script("return formatNumber(-1e77)") == "−1.00e+77"


def test_weights_and_numbers_of_the_lens_are_shown(browser, finished_run, tmp_path):
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    dot = "data:image/png;base64," + base64.b64encode(tile()).decode()
    one = {"weight": 0.25, "image": dot, "name": "test/3/1.png"}
    query = {"query": {"name": "test/7/2.png", "view": dot, "image": dot}, "positives": [one] * 4}
    query |= {"hardest": [one] * 4, "easiest": [one | {"weight": 1e-5}] * 4}
    numbers = [{"name": "alignment", "value": 0.5, "note": "0: views agree"}]
    (run / "lens.json").write_text(json.dumps({"version": 1, "plots": [], "numbers": numbers, "weights": [query]}))
    for width in (1280, 390):
        visit(browser, report([run], tmp_path / "page.html"), width)
        check(browser)
        assert len(browser.find_elements("css selector", ".weights img")) == 13
        title = browser.find_element("css selector", ".weights h3").text
        assert title == "The farthest of 4 views gets 25.0% of the pull; the nearest other image gets 25.0% of the push"
        assert len(browser.find_elements("css selector", ".weights .csv, .numbers > .headed .csv")) == 2


def tile() -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (90, 120, 200)).save(buffer, "PNG")
    return buffer.getvalue()
