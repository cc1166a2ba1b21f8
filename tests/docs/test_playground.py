"""The playground of the law computes what kontrast.objectives compute, in a real browser, after real drags and keys.

K positives, M negatives of one anchor q.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kontrast.objectives import CACR, DCL, JCL, NTXent, Objective
from kontrast.objectives.inputs import check_inputs

from support.browser import open_browser, set_screen

pytestmark = pytest.mark.browser
DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = {
    "nt-xent": {"temperature": 0.35}, "dcl": {"temperature": 0.15}, "cacr": {"t_plus": 1.7, "t_minus": 0.6},
    "jcl": {"temperature": 0.55, "covariance_weight": 2.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The element of the law's page with its script and style, opened from a file."""
    folder = tmp_path_factory.mktemp("playground")
    (start,) = re.findall(r"```\{playground\}\n(.*?)```", (DOCS / "concepts" / "law.md").read_text(), re.DOTALL)
    files = [(DOCS / "_static" / name).as_uri() for name in ("kontrast.css", "playground.js")]
    (folder / "law.html").write_text(
        f'<!doctype html><html><head><meta charset="utf-8"><link rel="stylesheet" href="{files[0]}"></head>'
        f'<body><div id="playground" class="playground" data-start="{html.escape(start)}"></div>'
        f'<script src="{files[1]}"></script></body></html>',
        encoding="utf-8",
    )
    with open_browser(folder / "profile") as browser:
        set_screen(browser, 1280)
        browser.get((folder / "law.html").as_uri())
        yield browser


def state(page: Any) -> dict[str, Any]:
    return json.loads(page.execute_script("return document.getElementById('playground').dataset.state"))


def choose(page: Any, name: str, settings: dict[str, float]) -> None:
    """Select an objective and set its sliders, as a reader would."""
    page.execute_script(
        "const [name, settings] = arguments; const root = document.getElementById('playground');"
        "const set = (e, value) => { e.value = value;"
        "  for (const type of ['input', 'change']) e.dispatchEvent(new Event(type)); };"
        "set(root.querySelector('select'), name);"
        "for (const [key, value] of Object.entries(settings)) set(root.querySelector(`[name=${key}]`), value);",
        name, settings,
    )  # fmt: skip


def drag(page: Any, point: str, degrees: float) -> None:
    """Drag a point with the mouse to an angle."""
    from selenium.webdriver import ActionChains

    picture = page.find_element("css selector", "#playground > svg")
    grip = page.find_element("css selector", f"[data-point='{point}'] .grip")
    x, y = 100 * math.cos(math.radians(degrees)), -100 * math.sin(math.radians(degrees))
    ActionChains(page).click_and_hold(grip).move_to_element_with_offset(picture, round(x), round(y)).release().perform()


def built(found: dict[str, Any]) -> Objective:
    settings = {key: found["settings"][key] for key in SETTINGS[found["objective"]]}
    if found["objective"] == "cacr":
        return CACR(**settings, detach_positive_weights=False)  # constant only because the keys are a teacher's
    return {"nt-xent": NTXent, "dcl": DCL, "jcl": JCL}[found["objective"]](**settings)


def rows(angles: list[float]) -> Tensor:
    angle = torch.tensor(angles, dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def compare(found: dict[str, Any]) -> None:
    """Compare the loss, its terms and the gradient with those of kontrast, for the angles on the page.

    An objective needs two images. The second one is the last negative: CACR counts it as the same view of another
    image, and for the others it is in the bank.
    """
    objective = built(found)
    anchor = rows([found["anchor"]])[0].requires_grad_()
    positives, negatives = rows(found["positives"]), rows(found["negatives"])
    z = torch.stack([anchor, negatives[-1]])[None]
    keys = torch.stack([positives, positives], dim=1)
    bank = negatives[:-1] if found["objective"] == "cacr" else negatives
    terms = objective.contrast(objective.pairs(check_inputs(z, keys=keys, bank=bank)))
    loss = objective.rows(z, keys=keys, bank=bank)[0, 0]
    (gradient,) = torch.autograd.grad(loss, anchor)
    for name, value in [("loss", loss), *((name, term[0, 0]) for name, term in terms.items())]:
        assert found[name] == pytest.approx(value.item(), abs=1e-6), (found["objective"], name)
    assert found["gradient"] == pytest.approx(gradient.tolist(), abs=1e-6), found["objective"]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_numbers_are_those_of_kontrast_after_drags_keys_and_new_points(page, name):
    page.execute_script("[...document.querySelectorAll('button')].find((b) => b.textContent === 'start again').click()")
    choose(page, name, SETTINGS[name])
    before = state(page)
    compare(before)
    drag(page, "positives 0", -170)
    drag(page, "anchor 0", 100)
    page.find_element("css selector", "[aria-label='more positives']").click()
    page.find_element("css selector", "[aria-label='fewer negatives']").click()
    page.find_element("css selector", "[data-point='negatives 1']").send_keys("\ue012\ue012")  # the left arrow key
    after = state(page)
    compare(after)
    assert after["objective"] == name and after["settings"] | SETTINGS[name] == after["settings"]
    assert math.degrees(after["anchor"]) == pytest.approx(100, abs=1.5)
    assert math.degrees(after["positives"][0]) == pytest.approx(-170, abs=1.5)
    assert after["negatives"][1] == pytest.approx(before["negatives"][1] + math.radians(6))
    assert (len(after["positives"]), len(after["negatives"])) == (3, 3)
    assert page.get_log("browser") == []


@pytest.mark.parametrize("name", SETTINGS)
def test_following_the_gradient_lowers_the_loss(page, name):
    page.execute_script("[...document.querySelectorAll('button')].find((b) => b.textContent === 'start again').click()")
    choose(page, name, SETTINGS[name])
    before = state(page)
    page.find_element("css selector", "button.main").click()
    after = state(page)
    compare(after)
    assert after["loss"] < before["loss"]
    assert abs(after["turn"]) < abs(before["turn"])


def test_the_table_and_the_lines_show_the_weights(page):
    choose(page, "dcl", {"temperature": 0.2})
    found = state(page)
    shown = page.execute_script(
        "return [...document.querySelectorAll('#playground tbody tr')].map((row) => row.innerText.split(/\\s+/))"
    )
    repulsions = [float(cells[3]) for cells in shown]
    assert sum(repulsions) == pytest.approx(1, abs=0.005)
    assert [float(cells[2]) for cells in shown[: len(found["positives"])]] == [0.5, 0.5]
    widths = page.execute_script(
        "const lines = [...document.querySelectorAll('#playground line')];"
        "return lines.map((line) => Number(line.getAttribute('stroke-width')))"
    )
    nearest = max(range(len(repulsions)), key=repulsions.__getitem__)
    assert widths[nearest] == max(widths[len(found["positives"]) :])


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_a_phone_and_a_touch_moves_a_point(page, width):
    set_screen(page, width)
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    center = page.execute_script(
        "const box = document.querySelector('#playground > svg').getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2]"
    )
    grip = page.execute_script(
        "const box = document.querySelector('[data-point=\"anchor 0\"] .grip').getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2]"
    )
    for kind, points in [("Start", [grip]), ("Move", [[center[0], center[1] - 80]]), ("End", [])]:
        touches = [{"x": x, "y": y} for x, y in points]
        page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": touches})
    assert math.degrees(state(page)["anchor"]) == pytest.approx(90, abs=1.5)
