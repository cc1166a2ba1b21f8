"""From a run to a classifier: training with few labels, the saved folder, its predictions, and what to label next."""

from __future__ import annotations

import csv
import json
import os
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kontrast
from kontrast.errors import CheckpointError, DataError, Stopped, UsageError
from kontrast.probes import extract_features
from kontrast.runs import embed as embed_module
from kontrast.runs.classifier import Classifier, entropy
from kontrast.runs.embeddings_file import names_path
from kontrast.runs.labeled_images import open_labeled
from kontrast.runs.predict import predict
from kontrast.runs.run import open_run
from kontrast.runs.select import select

from support import tiny_run
from support.command_line import kontrast as command
from support.doctests import run_examples


def silent(_: str) -> None:
    pass


def finetune(*arguments, **options):
    return kontrast.finetune(*arguments, device="cpu", say=silent, **options)


def rows_of(path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.reader(file))


def write_few(path, names, label=lambda name: name[0]):
    path.write_text("file,label\n" + "".join(f"{name},{label(name)}\n" for name in names))
    return path


@pytest.fixture(scope="module")
def names():
    root = tiny_run.images()
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.png"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A linear classifier on the run's own images."""
    return finetune(tiny_run.trained(), linear=True, out=tmp_path_factory.mktemp("m") / "model").path


@pytest.mark.parametrize("verb", ["finetune", "predict", "select"])
def test_examples(verb, tmp_path, monkeypatch):
    tiny_run.example_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    run_examples(getattr(kontrast, verb))


def test_a_linear_classifier_is_as_accurate_as_the_linear_probe(tmp_path):
    """The same fit, folded into a layer for features as they are."""
    model = finetune(tiny_run.trained(), linear=True, out=tmp_path / "model").path
    facts = json.loads((model / "classifier.json").read_text())
    (probe,) = [
        r for r in kontrast.probe(tiny_run.copy(model.parent), "linear", device="cpu") if r.features == "trained"
    ]
    assert facts["accuracy"]["accuracy"] == probe.accuracy and facts["accuracy"]["n"] == probe.n
    assert sum(count for *_, count in facts["confusion"]) == probe.n
    right = sum(count for true, found, count in facts["confusion"] if true == found)
    assert right == round(probe.accuracy * probe.n)


def test_predictions_are_those_of_the_network(model, tmp_path, names):
    classifier = Classifier(model)
    predict(model, tiny_run.images(), tmp_path / "p.csv", probabilities=True, device="cpu", say=silent)
    head, *rows = rows_of(tmp_path / "p.csv")
    assert head == ["file", "label", "probability", *(f"probability:{label}" for label in classifier.labels)]
    assert sorted(row[0] for row in rows) == names
    images = kontrast.data.open_data(tiny_run.images(), "train", test_share=0)
    expected = extract_features(classifier.network(), images, classifier.transform())
    assert [row[0] for row in rows] == list(images.names)
    given = torch.tensor([[float(cell) for cell in row[3:]] for row in rows])
    assert torch.allclose(given, expected, atol=1e-5) and torch.allclose(
        given.sum(1), torch.ones(len(given)), atol=1e-4
    )
    assert [row[1] for row in rows] == [classifier.labels[i] for i in expected.argmax(1).tolist()]


def test_json_and_json_lines_have_the_rows_of_the_csv(model, tmp_path):
    for suffix in ("csv", "json", "jsonl"):
        predict(model, tiny_run.images(), tmp_path / f"p.{suffix}", device="cpu", say=silent)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert json.loads((tmp_path / "p.json").read_text()) == lines
    assert [[r["file"], r["label"], str(r["probability"])] for r in lines] == rows_of(tmp_path / "p.csv")[1:]


def test_an_interrupted_prediction_continues_to_the_same_bytes(model, tmp_path):
    images = kontrast.data.open_data("digits", "test").first(600)
    whole, broken = tmp_path / "whole.csv", tmp_path / "broken.csv"
    with mock.patch.object(embed_module, "BATCHES_PER_PART", 1):
        predict(model, images, whole, device="cpu", say=silent)
        original, calls = embed_module.write_part, []

        def stop_at_second(*arguments):
            calls.append(0)
            if len(calls) == 2:
                raise Stopped("stopped")
            return original(*arguments)

        with mock.patch.object(embed_module, "write_part", stop_at_second), pytest.raises(Stopped):
            predict(model, images, broken, device="cpu", say=silent)
        assert not broken.exists()
        said = []
        predict(model, images, broken, device="cpu", say=said.append)
    assert said[0] == "continuing: 1 of 3 parts are done" and broken.read_bytes() == whole.read_bytes()
    assert len(rows_of(whole)) == 601 and not list(tmp_path.glob("*.parts"))


def test_few_labels_are_measured_by_cross_validation(tmp_path, names):
    few = write_few(tmp_path / "few.csv", [name for name in names if name[0] in "012"][::2])
    result = finetune(tiny_run.trained(), tiny_run.images(), labels=few, linear=True, out=tmp_path / "m")
    labeled = len(rows_of(few)) - 1
    assert result.labels == ["0", "1", "2"] and result.images == labeled == result.accuracy.n
    assert result.measured == "by 5-fold cross-validation"
    facts = json.loads((tmp_path / "m" / "classifier.json").read_text())
    assert facts["unlabeled"] == len(names) - labeled and len(facts["uncertain"]) == 24
    unsure = [entry["uncertainty"] for entry in facts["uncertain"]]
    assert unsure == sorted(unsure, reverse=True) and 0 < unsure[-1] <= unsure[0] <= 1
    given = {row[0] for row in rows_of(few)}
    assert not given & {entry["file"] for entry in facts["uncertain"]}  # unlabeled ones are worth more
    assert sorted(rows_of(tmp_path / "m" / "labels.csv")) == sorted(rows_of(few))


def test_cross_validation_tests_no_classifier_on_its_training_images(tmp_path, names):
    """Labels that the images don't determine are guessed at chance, though the classifier could learn them by heart."""
    few = write_few(tmp_path / "few.csv", names, lambda name: str(int(name[-5]) % 2))
    result = finetune(tiny_run.trained(), tiny_run.images(), labels=few, linear=True, out=tmp_path / "m")
    assert result.accuracy.low < 0.5 < result.accuracy.high or result.accuracy.accuracy < 0.6


def test_the_whole_network_is_trained_and_saved(tmp_path):
    run = kontrast.Run(tiny_run.trained())
    result = finetune(run, epochs=1, folds=0, out=tmp_path / "m")
    assert result.accuracy is None and "accuracy unknown: not measured" in str(result)
    before, after = run.encoder().state_dict(), result.classifier.encoder().state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert result.classifier.recipe.encoder == run.recipe.encoder
    embedded = kontrast.embed(tmp_path / "m", tiny_run.images(), tmp_path / "v.npy", device="cpu", say=silent)
    assert embedded.images == tiny_run.IMAGES  # the folder is a run


def test_the_folder_has_a_card_and_a_report(tmp_path, names):
    few = write_few(tmp_path / "few.csv", names, lambda name: "<b>`|cat\x1b" if name[0] < "5" else "dog")
    done = command("finetune", str(tiny_run.trained()), str(tiny_run.images()), "--labels", str(few), "--linear",
                   "--out", str(tmp_path / "m"), "--device", "cpu", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    page, card = (tmp_path / "m" / "report.html").read_text(), (tmp_path / "m" / "README.md").read_text()
    assert tree["labels"] == ["<b>`|cat\x1b", "dog"] and tree["accuracy"]["n"] == len(names)
    share = f"{100 * tree['accuracy']['accuracy']:.1f}%"
    assert share in card and "\\<b\\>\\`\\|cat\\\\x1b" in card and str(tmp_path) not in card
    assert f"It classifies {share}" in page and "<b>`" not in page and "5-fold cross-validation" in page


@pytest.mark.slow
def test_onnx_gives_the_probabilities(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import onnxruntime

    model = finetune(tiny_run.trained(), linear=True, onnx=True, out=tmp_path / "m").classifier
    x = model.prepare(next(tiny_run.images().rglob("*.png")))
    session = onnxruntime.InferenceSession(str(tmp_path / "m" / "classifier.onnx"))
    (given,) = session.run(["probabilities"], {"images": x.numpy()})
    assert np.allclose(given, model.network()(x).detach().numpy(), atol=1e-4)


def test_rows_that_name_no_image_are_told(tmp_path, names):
    """By training a classifier and by the choice of images to label."""
    few = write_few(tmp_path / "few.csv", [*(name for name in names if name[0] in "01"), "2/typo.png"])
    run, told = open_run(tiny_run.trained()), []
    _, sets = open_labeled(run, str(tiny_run.images()), str(few), None, told.append)
    rows = len(sets.train) + 1
    assert sets.classes == ["0", "1"]
    assert told == [f"{few}: 1 of {rows} rows name no image, the first '2/typo.png'; no image has the label '2'"]
    vectors, told = tmp_path / "v.npy", []
    np.save(vectors, np.eye(4, dtype=np.float32))
    names_path(vectors).write_text("".join(f'{{"path": "{name}"}}\n' for name in "abcd"))
    few.write_text("a,cat\nx,dog\n")
    select(vectors, 1, labels=few, out=tmp_path / "c.csv", say=told.append)
    assert told[0].startswith(f"{few}: 1 of 2 rows name none of the images to choose from, the first 'x'; no image has")


def test_selected_images_take_labels(tmp_path, names):
    run, chosen = tiny_run.copy(tmp_path), tmp_path / "c.csv"
    found = select(run, 20, out=chosen, device="cpu", say=silent)
    assert len({item.file for item in found}) == 20 and {item.file for item in found} <= set(names)
    assert select(run, 20, out=tmp_path / "again.csv", device="cpu", say=silent).items == found.items
    with pytest.raises(UsageError, match="already exists, perhaps with labels"):
        select(run, 20, out=chosen)
    with pytest.raises(DataError, match="its label column is empty"):
        finetune(run, tiny_run.images(), labels=chosen, linear=True, out=tmp_path / "m")
    rows = rows_of(chosen)
    with open(chosen, "w", newline="") as file:  # the last row stays without a label
        csv.writer(file).writerows([rows[0], *([name, name[0], u] for name, _, u in rows[1:-1]), rows[-1]])
    model = finetune(run, tiny_run.images(), labels=chosen, linear=True, out=tmp_path / "m")
    assert model.images == 19
    more = select(tmp_path / "m", 30, out=tmp_path / "more.csv", device="cpu", say=silent)
    labeled = {row[0] for row in rows[1:-1]}
    assert not labeled & {item.file for item in more} and more.labeled == 19 and more.candidates == len(names) - 19
    assert all(0 < item.uncertainty <= 1 for item in more)


def test_entropy_is_one_for_equal_and_zero_for_certain_probabilities():
    p = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]])
    assert torch.allclose(entropy(p), torch.tensor([1.0, 0.0, 0.5]))


def test_bad_arguments_are_one_clear_line(model, tmp_path, names):
    run, images, out = tiny_run.trained(), tiny_run.images(), tmp_path / "m"
    flat = tmp_path / "flat"
    flat.mkdir()
    for name in names[:3]:
        shutil.copy(images / name, flat / os.path.basename(name))
    one = write_few(tmp_path / "one.csv", names[:3], lambda name: "a")
    other = write_few(tmp_path / "other.csv", ["x.png", "y.png"])
    cases = [
        (DataError, "flat has no labels: give class sub-folders, or --labels", {"data": flat}),
        (DataError, "one class, 'a'", {"data": images, "labels": one}),
        (
            DataError,
            r"labels no image of .*'0/018.png': it labels 2 others",
            {"data": images, "labels": other},
        ),
        (DataError, "can't read the labels", {"data": images, "labels": tmp_path / "none.csv"}),
        (UsageError, "--epochs, --search is for training the whole", {"linear": True, "epochs": 3, "search": True}),
        (UsageError, "unknown fine-tuning protocol 'sdg'", {"protocol": "sdg"}),
        (UsageError, "at least 2 folds", {"folds": 1}),
        (UsageError, "already exists", {"out": tmp_path}),
    ]
    for kind, text, options in cases:
        with pytest.raises(kind, match=text):
            finetune(run, **{"out": out, **options})
        assert not out.exists()
    with pytest.raises(UsageError, match="is a run without a classifier: train one"):
        predict(run, images, tmp_path / "p.csv")
    with pytest.raises(UsageError, match=r"ends in \.csv, \.json or \.jsonl"):
        predict(model, images, tmp_path / "p.txt")
    with pytest.raises(DataError, match=r"can't classify torch.float32 \[2, 3, 8, 8\]"):
        predict(model, torch.zeros(2, 3, 8, 8), tmp_path / "p.csv")
    with pytest.raises(UsageError, match=r"--count 500: .* has 192 images without a label"):
        select(tiny_run.copy(tmp_path), 500, out=tmp_path / "s.csv", device="cpu", say=silent)


def damaged_json(folder):
    (folder / "classifier.json").write_text("{")


def other_labels(folder):
    facts = json.loads((folder / "classifier.json").read_text())
    (folder / "classifier.json").write_text(json.dumps({**facts, "labels": facts["labels"][:-1]}))


def no_labels(folder):
    (folder / "classifier.json").write_text(json.dumps({"version": 1, "labels": [1, 2]}))


def newer(folder):
    (folder / "classifier.json").write_text(json.dumps({"version": 2, "labels": ["a", "b"]}))


def other_weights(folder):
    weights = load_file(folder / "classifier.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, folder / "classifier.safetensors")


def nan_weights(folder):
    weights = load_file(folder / "classifier.safetensors")
    save_file({name: tensor * float("nan") for name, tensor in weights.items()}, folder / "classifier.safetensors")


def cut_weights(folder):
    path = folder / "classifier.safetensors"
    path.write_bytes(path.read_bytes()[:50])


DAMAGE = {
    damaged_json: "damaged: not JSON",
    other_labels: "does not fit 9 labels and 32 features",
    no_labels: "no list of two or more labels",
    newer: "written by a newer kontrast",
    other_weights: "its SHA-256 differs",
    nan_weights: "NaN or infinity",
    cut_weights: "not a readable safetensors file",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_classifier_is_refused(model, tmp_path, damage):
    folder = shutil.copytree(model, tmp_path / "m")
    damage(folder)
    with pytest.raises(CheckpointError, match=DAMAGE[damage]):
        predict(folder, tiny_run.images(), tmp_path / "p.csv", device="cpu", say=silent)
    assert not (tmp_path / "p.csv").exists()


def test_a_classifier_is_not_resumed_as_a_run(model):
    done = command("pretrain", "--resume", "--out", str(model), "--device", "cpu")
    assert done.returncode == 4 and "are gone" in done.stderr


def test_hostile_names_come_back_byte_for_byte(model, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    strange = ["a,b.png", 'q"uote.png', "new\nline.png", os.fsdecode(b"raw\xff.png"), "=1+1.png"]
    for name, source in zip(strange, tiny_run.images().rglob("*.png")):
        shutil.copy(source, photos / name)
    for suffix in ("csv", "jsonl"):
        predict(model, photos, tmp_path / f"p.{suffix}", device="cpu", say=silent)
    assert sorted(row[0] for row in rows_of(tmp_path / "p.csv")[1:]) == sorted(strange)
    lines = (tmp_path / "p.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["file"] for line in lines) == sorted(strange)
