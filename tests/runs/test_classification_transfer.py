"""`kontrast transfer --task classify`: sets from folders and CSV files, metrics, shots, search, one table of ranks."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from PIL import Image

import kontrast
from kontrast.errors import DataError, UsageError
from kontrast.runs import classification_transfer
from kontrast.runs.classification_transfer import ClassificationTransfer, metric_of, open_small_set, rows_with_labels
from kontrast.runs.run import Run
from kontrast.runs.transfer_jobs import measure_in_processes
from kontrast.runs.transfer_results import read_results

from support import tiny_run
from support.doctests import run_examples
from support.made_images import folder_of

QUICK = {"overrides": {"epochs": 2, "batch": 32}, "device": "cpu", "say": lambda line: None}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the finished run, photos in class folders, and a CSV with several labels per image beside them."""
    folder = tmp_path_factory.mktemp("small-sets")
    tiny_run.copy(folder)
    shutil.copytree(tiny_run.images(), folder / "photos")
    for number, color in enumerate(("red", "blue")):
        (folder / "colors" / color).mkdir(parents=True)
        for i in range(20):
            shade = (200 + i, 10, 10)[:: 1 - 2 * number]
            Image.new("RGB", (32, 32), shade).save(folder / "colors" / color / f"{i}.png")
    names = sorted(p.relative_to(folder / "photos") for p in (folder / "photos").rglob("*.png"))
    shapes = {0: "round", 6: "round|long", 8: "round", 9: "round|long", 1: "long", 7: "long"}
    rows = [f"{name},{shapes[int(name.parts[0])]}" for name in names if int(name.parts[0]) in shapes]
    (folder / "photos" / "shapes.csv").write_text("name,label\n" + "\n".join(rows) + "\n")
    halves = [f"{name},{int(int(name.parts[0]) > 4)}" for name in names]
    (folder / "photos" / "halves.csv").write_text("name,label\n" + "\n".join(halves) + "\n")
    return folder


def test_sets_methods_and_shots_give_one_table_with_ranks(place, monkeypatch):
    sets = [place / "colors", place / "photos" / "shapes.csv"]
    found = kontrast.transfer(place / "run", sets, "classify", seeds=2, methods=["linear"], search=False, **QUICK)
    assert len(found) == 2 * 2 * 2 * 2  # sets, shots, seeds, encoders
    assert {(one.data.rpartition("/")[2], one.metric) for one in found} == {
        ("colors", "accuracy"),
        ("shapes.csv", "map"),
    }
    assert {one.amount for one in found} == {"all", "5 per class"}
    trained = [one.score for one in found if (one.encoder, one.amount, one.metric) == ("trained", "all", "accuracy")]
    assert trained == [1, 1]
    text = str(found)
    assert "mean rank" in text and str(place) not in text
    assert '"Transfer: all sets"' in kontrast.report(place / "run").read_text()
    monkeypatch.setattr("kontrast.runs.classification_transfer.tuned_scores", lambda *_, **__: pytest.fail("again"))
    again = kontrast.transfer(place / "run", sets, "classify", seeds=2, methods=["linear"], search=False, **QUICK)
    assert list(again) == list(found)


def test_several_processes_measure_the_same_as_one(place, tmp_path, monkeypatch):
    run, sets = tmp_path / "run", [place / "colors", place / "photos"]
    shutil.copytree(place / "run", run, ignore=shutil.ignore_patterns("transfer*"))
    settings = {**QUICK, "overrides": {"epochs": 1, "batch": 8}, "against": [place / "run"], "shots": [2]}
    options = {"seeds": 1, "methods": ["linear"], "search": False, "control": False, **settings}
    alone = kontrast.transfer(run, sets, "classify", **options)
    (run / "transfer.json").rename(tmp_path / "alone.json")
    monkeypatch.setattr("kontrast.runs.classification_transfer.tuned_scores", lambda *_, **__: pytest.fail("here"))
    together = kontrast.transfer(run, sets, "classify", jobs=2, **options)
    assert [one.score for one in together] == [one.score for one in alone]
    assert [one.fingerprint for one in together] == [one.fingerprint for one in alone]


def test_a_failed_process_leaves_its_part_and_its_log(tmp_path):
    said = []
    arguments = ["--task=classify", "--device=cpu", "--", str(tmp_path), "photos"]
    measure_in_processes(arguments, 1, tmp_path, torch.device("cpu"), said.append)
    assert "1 of 1 processes failed" in said[0] and "job-0.log" in said[0]
    assert "is not a run folder" in (tmp_path / "job-0.log").read_text()


def test_fine_tuning_searches_rate_and_decay(place):
    found = kontrast.transfer(place / "run", place / "photos", "classify", seeds=1, shots=[5], methods=["fine-tuned"],
                              control=False, **{**QUICK, "overrides": ["epochs=1"]})  # fmt: skip
    tried = found[0].facts["settings"]["searched"]
    assert len(tried) == 9 and found[0].facts["train_images"] == 50 and found[0].facts["settings"]["epochs"] == 1


def test_the_metric_is_the_one_that_the_set_asks_for(place):
    run = Run(place / "run")
    shutil.copytree(place / "photos", place / "oxford-flowers")
    opened = open_small_set(run, str(place / "oxford-flowers"), "", print)
    assert opened.metric == "mean-per-class" and opened.classes == 10
    halves = open_small_set(run, str(place / "photos" / "halves.csv"), "roc-auc", print)
    assert halves.classes == 2 and halves.metric == "roc-auc" and len(halves.train) > 3 * len(halves.test) > 0
    several = open_small_set(run, str(place / "photos" / "shapes.csv"), "", print)
    assert several.labels.shape[1] == 2 and 0 < several.labels.mean() < 1
    with pytest.raises(UsageError, match="does not suit"):
        open_small_set(run, str(place / "photos"), "map", print)
    with pytest.raises(UsageError, match=r"unknown metric 'acc'.*accuracy"):
        open_small_set(run, str(place / "photos"), "acc", print)
    with pytest.raises(DataError, match="no file"):
        open_small_set(run, str(place / "photos" / "missing.csv"), "", print)
    with pytest.raises(UsageError, match="some of linear, fine-tuned"):
        kontrast.transfer(run, place / "photos", "classify", methods=["probe"])


def test_the_metric_is_guessed_from_whole_words_of_the_last_folder(tmp_path):
    labels, several = torch.tensor([0, 1, 2]), torch.tensor([[1, 0], [1, 1]])

    def guess(source, labels=labels):
        return metric_of(str(tmp_path / source), "", labels, labels)

    assert guess("carpets") == guess("flowers/colors") == guess("voc2007") == guess("hateful-memes") == "accuracy"
    assert guess("oxford-iiit-pets") == guess("Caltech101") == guess("fgvc_aircraft/labels.csv") == "mean-per-class"
    assert guess("pets", several) == "map" and guess("hateful-memes", labels[:2]) == "roc-auc"
    with pytest.raises(UsageError, match=r"'roc-auc' does not suit .*two classes that both have test images"):
        metric_of("colors", "roc-auc", labels, labels)
    with pytest.raises(UsageError, match="two classes that both have test images"):
        metric_of("colors", "roc-auc", labels[:2], labels[:1])


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("colors", {"overrides": {"randaugment": 9}}, "randaugment and repeats are for random crops"),
        ("colors", {"overrides": {"repeats": 3}}, "randaugment and repeats are for random crops"),
        ("colors", {"overrides": {"drop_path": 0.5}}, "drop_path is for kontrast's vision transformers"),
        ("colors", {"overrides": {"erasing": 0.2, "cutmix": 1}, "methods": ["linear"]}, "cutmix and erasing: no"),
        ("photos/shapes.csv", {"overrides": {"mixup": 0.8, "smoothing": 0.1}}, "mixup and smoothing: not for"),
        ("rare", {"shots": [0, 5]}, "class 'few' has 2 train images, but a few-shot probe needs 5"),
        ("rare", {"shots": [1]}, "a search of the learning rate needs two train images of a class"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(place, monkeypatch, data, options, message):
    if data == "rare":
        for part, count in (("train", 2), ("test", 1)):
            for name in ("few", "more"):
                folder_of(place / "rare" / part / name, count if name == "few" else 6)
    monkeypatch.setattr("kontrast.runs.classification_transfer.tuned_scores", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises((UsageError, DataError), match=message):
        kontrast.transfer(place / "run", [place / "colors", place / data], "classify", device="cpu", **options)


def test_a_linear_classifier_leaves_settings_of_images_to_fine_tuning(tmp_path):
    job = ClassificationTransfer(tmp_path, {"erasing": 0.25, "mixup": 0.8, "smoothing": 0.1}, False, "cpu")
    linear, tuned = (job.protocol(method) for method in ("linear", "fine-tuned"))
    assert (linear.erasing, linear.mixup, linear.smoothing) == (0, 0, 0.1)
    assert (tuned.erasing, tuned.mixup, tuned.smoothing) == (0.25, 0.8, 0.1)


def test_seeds_of_other_settings_leave_the_row(place, tmp_path, monkeypatch):
    """What an older version stored does not say which settings it is of; it is used and not trained again."""
    run = shutil.copytree(place / "run", tmp_path / "run", ignore=shutil.ignore_patterns("transfer*"))
    quick = {"methods": ["linear"], "search": False, "shots": [5], "control": False}

    def stored(seeds, **options):
        kontrast.transfer(run, place / "colors", "classify", seeds=seeds, **quick, **{**QUICK, **options})
        return [one.seed for one in read_results(run) if one.data == str(place / "colors")]

    assert stored(2, overrides={"epochs": 1}) == [0, 1]
    written = json.loads((run / "transfer.json").read_text())
    for entry in written["results"]:  # as older versions wrote it
        del entry["common"]
    (run / "transfer.json").write_text(json.dumps(written))
    trained, train = [], classification_transfer.tuned_scores
    monkeypatch.setattr(
        classification_transfer, "tuned_scores", lambda *given, **more: trained.append(1) or train(*given, **more)
    )
    assert stored(3, overrides={"epochs": 1}) == [0, 1, 2] and len(trained) == 1
    assert stored(1, overrides={"epochs": 2}) == [0]


def test_shots_of_several_labels():
    labels = torch.tensor([[1, 0], [1, 1], [1, 0], [0, 1], [0, 0]])
    rows = rows_with_labels(labels, 2, 0)
    assert labels[rows].sum(0).min() >= 2 and 4 not in rows and len(rows_with_labels(labels, 0, 0)) == 5


def test_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_run.example_folder(tmp_path)
    run_examples(kontrast.transfer)
