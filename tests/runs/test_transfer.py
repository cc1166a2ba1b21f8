"""`kontrast transfer`: detectors on a run's encoder, controls, resuming, the report; backbones for other programs."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

import kontrast
from kontrast.data.annotated import AnnotatedImages, canvas_objects, write_coco, write_voc
from kontrast.data.annotated.annotated_images import UnreadablePicture
from kontrast.detection import fpn_backbone
from kontrast.detection.detectron2_names import detectron2_names
from kontrast.errors import CheckpointError, DataError, EnvironmentFault, KontrastError, UsageError
from kontrast.networks import encoder
from kontrast.runs import detector_training
from kontrast.runs.transfer_encoders import random_encoder
from kontrast.runs.transfer_results import TransferResult, rank_table, read_results, transfer_tables, with_interval

from support.doctests import run_examples

TINY = {"steps": 4, "batch": 2, "channels": 16, "head_width": 32, "mask_layers": 1, "keypoint_layers": 1, "flip": 0.5}
TINY |= {"short_sides": [96], "test_side": 96, "longest": 96, "regions": 16, "proposals": 20, "warmup": 1, "crop": 0.5}


def make_run(place, **settings):
    overrides = {"training": {"max_steps": 1, "batch": 16}, "evaluation": {"every": 0, "gallery": 0}, **settings}
    return kontrast.pretrain("digits", out=place, device="cpu", say=lambda line: None, **overrides)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "resnet", encoder={"name": "small-resnet", "width": 16})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("annotated")
    train, test = canvas_objects("train").subset(range(12)), canvas_objects("test").subset(range(4))
    write_coco(train, place / "coco")
    write_coco(test, place / "coco")
    write_voc(train, place / "voc", [test])
    return place


def transfer(run, *arguments, **options):
    settings = {"device": "cpu", "seeds": 1, "say": lambda line: None, **options}
    return kontrast.transfer(run, *arguments, **{"overrides": TINY, **settings})


@pytest.mark.parametrize("task", ["boxes", "masks", "keypoints"])
def test_each_task_is_measured_beside_random_weights_and_shown_in_the_report(run, folders, task):
    found = transfer(run, folders / "coco", task)
    assert [one.encoder for one in found] == ["trained", "random"] and str(found).startswith("data ")
    assert all(set(one.scores) == {"AP", "AP50", "AP75", "AP50 (11 points)"} and 0 <= one.score <= 1 for one in found)
    assert found[0].facts["train_images"] == 12 and found[0].facts["test_images"] == 4
    page = kontrast.report(run).read_text()
    assert f'"Transfer: {task}"' in page and "data:image/png;base64" in page and "12)" in page
    assert str(folders) not in page


def test_a_repeated_call_measures_nothing_again_and_other_settings_do(run, folders, monkeypatch):
    first = transfer(run, folders / "voc", labels=0.5, seeds=2)
    assert [one.amount for one in first] == ["50% (6)"] * 4
    monkeypatch.setattr(detector_training.DetectorJob, "train", lambda *_: pytest.fail("it was measured before"))
    again = transfer(run, folders / "voc", labels=0.5, seeds=2)
    assert list(again) == list(first)
    with pytest.raises(pytest.fail.Exception):
        transfer(run, folders / "voc", labels=0.5, overrides={**TINY, "lr": 0.001})
    kept = [one for one in read_results(run.path) if one.data == str(folders / "voc")]
    assert len(kept) == 4


def test_an_interrupted_training_ends_with_the_weights_of_one_that_was_not(run, folders, monkeypatch):
    """A signal in the second step: the step ends, its checkpoint is written, and the same call goes on from it."""
    options = {"control": False, "overrides": {**TINY, "lr": 0.002}}
    whole = transfer(run, folders / "voc", **options)[0]
    weights = sorted(run.path.glob("transfer/boxes-*/detector.safetensors"), key=lambda p: p.stat().st_mtime)[-1]
    expected, losses = load_file(weights), (weights.parent / "metrics.jsonl").read_text()
    for name in ("detector.safetensors", "metrics.jsonl"):
        (weights.parent / name).unlink()
    (run.path / "transfer.json").unlink()
    steps, step = [], detector_training.DetectorJob._step

    def interrupted(self, model, optimizer, images, targets, number):
        steps.append(number)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGTERM)
        return step(self, model, optimizer, images, targets, number)

    monkeypatch.setattr(detector_training.DetectorJob, "_step", interrupted)
    with pytest.raises(KontrastError, match="stopped and saved at step 2 of 4"):
        transfer(run, folders / "voc", **options)
    again = transfer(run, folders / "voc", **options)[0]
    assert steps == [0, 1, 2, 3]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(weights).items())
    assert (weights.parent / "metrics.jsonl").read_text() == losses and again.scores == whole.scores
    assert not (weights.parent / "checkpoints").exists()


def test_damaged_images_are_left_out_and_counted(run, folders, tmp_path, monkeypatch):
    shutil.copytree(folders / "voc", tmp_path / "voc")
    lists = tmp_path / "voc" / "ImageSets" / "Main"
    damaged = [(lists / f"{name}.txt").read_text().split()[0] for name in ("trainval", "test")]
    for stem in damaged:
        path = tmp_path / "voc" / "JPEGImages" / f"{stem}.png"
        path.write_bytes(path.read_bytes()[:-24])
    said = []
    found = transfer(run, tmp_path / "voc", control=False, say=said.append, overrides={**TINY, "steps": 6})[0]
    assert found.facts["test_images"] == 3 and found.facts["unreadable_train_images"] == 1
    assert [f"JPEGImages/{stem}.png (damaged" in line for stem, line in zip(damaged[::-1], said)] == [True, True]
    monkeypatch.setattr(AnnotatedImages, "read", unreadable)
    with pytest.raises(DataError, match=r"none of the 12 training images can be read, the first is .* \(damaged\)"):
        transfer(run, tmp_path / "voc", control=False)


def unreadable(images, index, masks=False):
    raise UnreadablePicture("place", images.names[index], "damaged")


def test_controls_and_other_runs(run, folders, tmp_path):
    other = make_run(tmp_path / "other", encoder={"name": "small-resnet", "width": 8})
    found = transfer(run, folders / "voc", against=[other], overrides={**TINY, "steps": 1})
    assert [one.encoder for one in found] == ["trained", str(other.path), "random"]
    own, same = random_encoder(run, run.recipe.seed), run.encoder(trained=False)
    assert all(torch.equal(a, b) for a, b in zip(own.state_dict().values(), same.state_dict().values()))
    assert not torch.equal(random_encoder(run, 1).conv1.weight, own.conv1.weight)


@pytest.mark.parametrize(
    ("protocol", "task"),
    [
        ("cacr-coco", "masks"),
        ("jcl-coco", "boxes"),
        ("jcl-coco", "masks"),
        ("jcl-coco", "keypoints"),
        ("cacr-voc", "boxes"),
    ],
)
def test_the_papers_protocols_take_three_steps_on_a_made_set(run, folders, protocol, task, monkeypatch):
    """In COCO's layout, with the papers' settings except for the lengths and numbers that a test can't afford."""
    pytest.importorskip("faster_coco_eval", reason="faster-coco-eval is not installed")
    small = {
        "steps": 3,
        "batch": 2,
        "short_sides": [96],
        "test_side": 96,
        "regions": 16,
        "proposals": 20,
        "channels": 16,
    }
    data = folders / ("voc" if protocol == "cacr-voc" else "coco")
    found = transfer(run, data, task, protocol=protocol, overrides=small, control=False)
    assert found[0].method == protocol and found[0].facts["steps"] == 3
    assert found[0].facts["metric"] == ("voc" if protocol == "cacr-voc" else "coco")


def test_what_is_wrong_is_one_clear_line(run, folders, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"unknown task 'box'.*boxes"):
        transfer(run, task="box")
    with pytest.raises(UsageError, match="labels = 0"):
        transfer(run, labels=0)
    with pytest.raises(UsageError, match=r"unknown key 'step'.*did you mean 'steps'"):
        transfer(run, overrides=["step=3"])
    with pytest.raises(DataError, match="has no masks"):
        transfer(run, folders / "voc", "masks")
    with pytest.raises(DataError, match="no folder"):
        transfer(run, tmp_path / "missing")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="without torchrun"):
        transfer(run)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setitem(__import__("sys").modules, "faster_coco_eval", None)
    with pytest.raises(EnvironmentFault, match=r"kontrast\[coco\].*metric=voc"):
        transfer(run, folders / "coco", overrides={**TINY, "metric": "coco"})


def test_load_gives_the_same_backbone_as_the_detector_has(run):
    backbone = kontrast.load(run, as_="fpn")
    x = torch.rand(1, 3, 48, 64)
    assert torch.equal(backbone.body(x)["2"].mean((2, 3)), kontrast.load(run)(x)) and not backbone.training
    assert [tuple(m.shape[1:]) for m in backbone(x).values()] == [
        (256, 24, 32),
        (256, 12, 16),
        (256, 6, 8),
        (256, 3, 4),
    ]
    again = kontrast.load(run, as_="fpn")
    assert all(torch.equal(a, b) for a, b in zip(backbone.state_dict().values(), again.state_dict().values()))
    assert kontrast.load(run, as_="c4")(x)["0"].shape == (1, 8, 12, 16)
    with pytest.raises(UsageError, match=r"as_ = 'fpm'.*fpn"):
        kontrast.load(run, as_="fpm")
    fpn_backbone(kontrast.load(run))


def test_names_for_detectron2(run, tmp_path):
    """The names of a ResNet-50 are those that detectron2's own ResNet has."""
    names = set(detectron2_names(encoder("resnet-50", size=224, stem="imagenet").state_dict()))
    convolutions = {"stem.conv1"}
    for stage, blocks in (("res2", 3), ("res3", 4), ("res4", 6), ("res5", 3)):
        convolutions |= {f"{stage}.{b}.conv{i}" for b in range(blocks) for i in (1, 2, 3)} | {f"{stage}.0.shortcut"}
    norm = ("weight", "bias", "running_mean", "running_var")
    assert names == {f"{c}.weight" for c in convolutions} | {f"{c}.norm.{n}" for c in convolutions for n in norm}
    result = kontrast.export(run, "detectron2", tmp_path / "encoder.safetensors")
    state, card = load_file(result.path), json.loads(result.card.read_text())
    assert torch.equal(state["res2.0.conv1.weight"], run.encoder().layer1[0].conv1.weight)
    assert card["detectron2"]["prefixes"]["fpn"] == "backbone.bottom_up." and card["format"] == "detectron2"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"results": [1]}', '{"results": [{"task": "boxes"}]}', "score"])
def test_a_damaged_file_of_results_is_one_clear_line(tmp_path, content):
    if content == "score":
        content = json.dumps({"results": [{**result("x", 0, 0.5).to_dict(), "score": "high"}]})
    (tmp_path / "transfer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"transfer.json is damaged"):
        read_results(tmp_path)


def result(encoder, seed, score, data="a", method="linear"):
    return TransferResult("classify", data, encoder, method, "all", seed, "accuracy", score)


def test_tables_have_means_intervals_and_ranks():
    rows = [result("x", 0, 0.5), result("x", 1, 0.52), result("y", 0, 0.9), result("y", 1, 0.9)]
    rows += [result("x", 0, 0.8, "b"), result("x", 1, 0.8, "b"), result("y", 0, 0.8, "b"), result("y", 1, 0.8, "b")]
    table, ranks = transfer_tables(rows)
    assert table["rows"][0][-1] == "51.0 (38.3 to 63.7)" and table["rows"][1][-1] == "90.0 (90.0 to 90.0)"
    assert [row[-1] for row in ranks["rows"]] == ["1.75", "1.25"]  # second and tied, first and tied
    assert ranks["rows"][0][4].startswith("65.5") and ranks["rows"][1][4].startswith("85.0")
    lonely = rank_table([*rows, result("x", 0, 0.1, "c")])  # a set that not all encoders have does not count
    assert [row[3] for row in lonely["rows"]] == ["2", "2"]


@pytest.mark.parametrize("thing", [TransferResult, with_interval, detectron2_names])
def test_examples(thing):
    run_examples(thing)
