"""A run with a text tower from the command line: probes, search by text, and the report's panel."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import kontrast
from kontrast.cli import main as cli
from kontrast.errors import DataError, UsageError
from kontrast.probes import extract_features
from kontrast.reports.run_files import read_run
from kontrast.runs.classification_transfer import open_small_set
from kontrast.runs.labeled_images import open_labeled
from kontrast.runs.probe import open_images
from kontrast.runs.text_probes import TEXT_RESULTS
from kontrast.runs.towers import Towers

from support import tiny_run
from support.made_images import folder_of

TINY = {
    "training": {"batch": 64, "epochs": 1, "max_steps": 3}, "evaluation": {"every": 0, "k": 5, "gallery": 40},
    "encoder.width": 16, "head.outputs": 8, "views.size": 16,
    "text": {"width": 16, "depth": 1, "heads": 2, "length": 40, "dropout": 0.0, "templates": "digits"},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("texts") / "run"
    return kontrast.pretrain(None, "digits/clip", out=place, device="cpu", say=lambda _: None, **TINY)


@pytest.fixture(scope="module")
def results(run):
    return kontrast.probe(run, "retrieval", device="cpu", say=lambda _: None)


def test_retrieval_is_measured_beside_the_untrained_towers(run, results):
    assert [(r.probe, r.features) for r in results] == [
        (name, features) for features in ("trained", "untrained") for name in TEXT_RESULTS["retrieval"]
    ]
    saved = json.loads((run.path / "probes.json").read_text())["probes"]
    assert len(saved) == 12 and {entry["probe"] for entry in saved} == set(TEXT_RESULTS["retrieval"])
    table = str(results).splitlines()
    assert table[0].split() == ["accuracy", "trained", "untrained", "pixels"] and table[1].startswith(
        "image-to-text-r1 "
    )


def test_zero_shot_on_the_command_line(run, capsys):
    assert cli.run(["probe", str(run.path), "zero-shot", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["probes"]
    assert [p["probe"] for p in found if p["features"] == "trained"] == list(TEXT_RESULTS["zero-shot"])
    everything, unseen, pairs = found[:3]
    assert everything["n"] == 1536 and unseen["n"] == pairs["n"] < 400
    assert everything["low"] <= everything["accuracy"] <= everything["high"] and pairs["protocol"]["classes"] == 80
    assert everything["per_class"][3]["class"] == "3"
    again = ["probe", str(run.path), "zero-shot", "--templates", "only {} here", "--device", "cpu", "--json"]
    assert cli.run(again) == 0
    assert json.loads(capsys.readouterr().out)["probes"][0]["protocol"]["templates"] == ["only {} here"]
    assert cli.run(["probe", str(run.path), "zero-shot", "--templates", "no place"]) == 2
    assert "give a template with one {}" in capsys.readouterr().err


def test_images_are_found_by_text(run):
    found = kontrast.neighbors(run, "a small red 3", k=4, device="cpu", say=lambda _: None)
    assert found.to_dict()["text"] == "a small red 3" and len(found) == 4
    towers, train = Towers(run, "cpu"), run.data("train")
    features = extract_features(run.encoder(), train, run.transform())
    cosines = (towers.texts(["a small red 3"]) @ towers.project(torch.nn.functional.normalize(features, dim=1)).T)[0]
    best = cosines.topk(4)
    assert [one.row for one in found] == best.indices.tolist()
    assert [one.similarity for one in found] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_run_without_texts_says_so(capsys):
    with pytest.raises(UsageError, match="was trained without texts: train with a recipe that has"):
        kontrast.probe(tiny_run.trained(), "zero-shot", device="cpu", say=lambda _: None)
    assert cli.run(["neighbors", str(tiny_run.trained()), "a dog in the snow", "--device", "cpu"]) == 3


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    """Pictures in class folders, without captions."""
    folder = tmp_path_factory.mktemp("colors")
    for name in ("red", "green"):
        folder_of(folder / name, 4)
    return folder


def test_classes_without_captions_are_probed_and_trained_on(run, colors):
    few = {"data": colors, "device": "cpu", "say": lambda _: None}
    sentences = kontrast.probe(run, "zero-shot", templates="a photo of {}", **few)
    assert sentences[0].protocol["classes"] == 2 and sentences[0].protocol["data"] == str(colors)
    assert {r.probe for r in kontrast.probe(run, **few)} == {"knn", "linear", "zero-shot"}
    with pytest.raises(DataError, match="has no captions"):
        kontrast.probe(run, "retrieval", **few)
    assert open_labeled(run, str(colors), None, None, print)[1].classes == ["green", "red"]
    assert open_small_set(run, str(colors), "", print).classes == 2


def test_probes_of_classes_use_images_without_captions_too(run, colors, tmp_path):
    shutil.copytree(colors, tmp_path / "some")
    (tmp_path / "some" / "captions.csv").write_text("file,caption\nred/0000.png,a red one\n")
    train, test = open_images(run, str(tmp_path / "some"), None, None, print)
    assert len(train) + len(test) == 8


def test_the_report_shows_what_texts_find(run, results, tmp_path):
    shown = read_run(run.path)
    assert len(shown.retrieval["queries"]) == 8 and not shown.problems
    assert [point["k"] for point in shown.retrieval["curve"]][:3] == [1, 2, 3]
    page = kontrast.report(run, tmp_path / "page.html").read_text()
    for text in ("How often is a right answer among the first K?", shown.retrieval["queries"][0]["name"]):
        assert text in page
    assert '"retrieval":{"tile":' in page


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda tree: tree["queries"][0].pop("rank"), "retrieval.json is incomplete"),
        (lambda tree: tree["curve"][0].update(k="one"), "retrieval.json is incomplete"),
        (lambda tree: tree["queries"][0]["hits"][0].update(tile=-1), "retrieval.json is incomplete"),
        (lambda tree: tree.update(sprite_sha256="0"), "don't belong together"),
    ],
)
def test_a_damaged_panel_is_a_note_on_the_page(run, results, tmp_path, damage, problem):
    shutil.copytree(run.path, tmp_path / "run")
    place = tmp_path / "run" / "retrieval.json"
    tree = json.loads(place.read_text())
    damage(tree)
    place.write_text(json.dumps(tree))
    found = read_run(tmp_path / "run")
    assert found.retrieval is None and any(problem in one for one in found.problems)
    assert "Texts" in kontrast.report(tmp_path / "run").read_text()  # the script; the data have no panel
