"""Train a classifier from a run's encoder and labeled images, and save it with its label names.

N labeled images, C classes, F features.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kontrast.config.recipe import DataSettings, fingerprint, to_toml
from kontrast.errors import UsageError, printable
from kontrast.files import atomic_folder, disk_faults
from kontrast.probes import ProbeResult
from kontrast.probes.fine_tuning import folds as folds_of
from kontrast.probes.finetuning_protocols import fine_tuning_named
from kontrast.probes.intervals import wilson
from kontrast.probes.result import predictions, result
from kontrast.runs.classifier import NEWEST, Classifier, ClassifierNetwork
from kontrast.runs.classifier_training import ClassifierTraining, FullTraining, LinearTraining
from kontrast.runs.export import checked_onnx
from kontrast.runs.labeled_images import LabeledSets, open_labeled
from kontrast.runs.model_card import card
from kontrast.runs.probe import with_names
from kontrast.runs.run import Run, open_run
from kontrast.training import checkpoints
from kontrast.training.device import choose_device
from kontrast.training.run_folder import VERSION, sha256, timestamp
from kontrast.training.splits import dtype_fact, place_of

ONNX_IMAGES = 32


@dataclass(frozen=True)
class FinetuneResult:
    """The folder that `finetune` wrote.

    Attributes:
        path: The folder.
        labels: The names of the classes.
        images: How many labeled images the classifier was trained on.
        accuracy: Its accuracy, with the interval; None if there were too few labels to measure one.
        measured: How it was measured.
    """

    path: Path
    labels: list[str]
    images: int
    accuracy: ProbeResult | None
    measured: str

    @cached_property
    def classifier(self) -> Classifier:
        """The classifier, opened."""
        return Classifier(self.path)

    def __str__(self) -> str:
        lines = [f"{len(self.labels)} classes, trained on {self.images:,} labeled images"]
        if self.accuracy is not None:
            a = self.accuracy
            interval = f"[{100 * a.low:.1f}, {100 * a.high:.1f}]"
            lines.append(f"accuracy {100 * a.accuracy:.1f}% {interval} over {a.n:,} images, {self.measured}")
        else:
            lines.append(f"accuracy unknown: {self.measured}")
        return "\n".join([*lines, f"out     {printable(str(self.path))}"])

    def to_dict(self) -> dict[str, Any]:
        accuracy = None if self.accuracy is None else self.accuracy.to_dict()
        facts = {"labels": self.labels, "images": self.images, "accuracy": accuracy, "measured": self.measured}
        return {"out": str(self.path), **facts}


def finetune(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    labels: str | os.PathLike[str] | None = None,
    linear: bool = False,
    protocol: str = "sgd",
    epochs: int = 0,
    search: bool = False,
    cached: bool = False,
    folds: int = 5,
    onnx: bool = False,
    out: str | os.PathLike[str] | None = None,
    device: str = "auto",
    max_bad: float | None = None,
    float_range: tuple[float, float] | None = None,
    say: Callable[[str], None] = print,
) -> FinetuneResult:
    """Train a classifier from a run's encoder and labeled images, and save it with its label names.

    The accuracy is that on labeled test images, if the data has some; else every labeled image is classified by a
    classifier that was trained without it (cross-validation). The saved one is trained on all labeled train images.

    Args:
        run: A run folder or a `kontrast.Run`.
        data: The images: a folder, a named set, shards or a store; default: the run's own.
        labels: A CSV file with the columns file,label. Images that it does not name are unlabeled; a few labels per
            class are enough. Default: the labels of the data, such as the names of class folders.
        linear: Train only a linear layer on the frozen features, in seconds; default: the whole network.
        protocol: How to train the whole network, a name in `kontrast.probes.FINE_TUNING`; default: "sgd".
        epochs: Epochs of training the whole network; 0 (default): those of its protocol.
        search: Choose learning rate and weight decay on held-out labeled images.
        cached: Train the whole network on uncropped images instead of fresh crops in every epoch.
        folds: How many classifiers the cross-validation trains; 0: don't measure the accuracy. Default: 5.
        onnx: Also write classifier.onnx, from images to probabilities, after comparing it with torch on real images.
        out: The folder to write; default: the run's path with "-classifier" appended. It must not exist yet.
        device: "auto" (default), "cpu" or "cuda".
        max_bad: The share of unreadable images that is allowed; default: the recipe's.
        float_range: The values of black and white in float images; default: the recipe's.
        say: Called with each line of progress and each warning; default: print.

    Returns:
        The folder, the labels, and the accuracy with its interval.

    Example:
        >>> import kontrast
        >>> model = kontrast.finetune("runs/digits", linear=True, device="cpu")
        >>> print(model)  # doctest: +ELLIPSIS
        10 classes, trained on 192 labeled images
        accuracy ...% [...] over 48 images, on labeled test images
        out     runs/digits-classifier
    """
    start, run = time.monotonic(), open_run(run, float_range)
    out = Path(out) if out is not None else run.path.with_name(f"{run.path.resolve().name}-classifier")
    check_options(linear, protocol, epochs, search, cached, folds)
    if out.exists():
        raise UsageError(f"--out {out} already exists: remove it, or give another folder")
    on, data, labels = choose_device(device), *(None if one is None else os.fspath(one) for one in (data, labels))
    settings, sets = open_labeled(run, data, labels, max_bad, say)
    job: ClassifierTraining
    if linear:
        job = LinearTraining(run, sets, on)
    else:
        tuning = fine_tuning_named(protocol)
        tuning = replace(tuning, epochs=epochs or tuning.epochs, batch=min(tuning.batch, len(sets.train)))
        job = FullTraining(run, sets, on, tuning, cached, search, folds)
    with job:
        network = job.network()
        tested = evaluate(job, network, folds)
        uncertain = job.most_uncertain(network)
    accuracy = tested.result(job, data, labels)
    facts = {
        "version": NEWEST,
        "labels": sets.classes,
        "images": len(sets.train),
        "unlabeled": len(sets.others),
        "mode": "linear" if linear else "full",
        "protocol": job.protocol,
        "accuracy": None if accuracy is None else accuracy.to_dict(),
        "measured": tested.how,
        "confusion": tested.confusion(),
        "uncertain": uncertain,
        "pretrained": {"run": run.path.resolve().name, "encoder_sha256": run.encoder_digest()},
    }
    network.cpu()
    content = checked_onnx(run, network, sets.train.first(ONNX_IMAGES))[0] if onnx else None
    save(Saving(out, run, settings, sets, network, facts, content, time.monotonic() - start))
    return FinetuneResult(out, sets.classes, len(sets.train), accuracy, tested.how)


@dataclass(frozen=True)
class Tested:
    """Probabilities [T,C] and labels [T] of images that a classifier was not trained on, and how they were chosen."""

    scores: Tensor
    labels: Tensor
    how: str

    def result(self, job: ClassifierTraining, data: str | None, labels: str | None) -> ProbeResult | None:
        """Return the accuracy with its interval; None if nothing was measured."""
        if not len(self.labels):
            return None
        protocol = {**job.protocol, "measured": self.how, "data": data, "labels": labels}
        protocol = {key: value for key, value in protocol.items() if value is not None}
        seed = job.run.recipe.seed
        found = result("finetune", predictions(self.scores, self.labels), protocol, seed)
        low, high = wilson(int(found.correct.sum()), found.n)
        found = replace(found, low=low, high=high)
        return with_names(found, "finetune", "trained", job.sets.train)

    def confusion(self) -> list[list[int]]:
        """Return [label, predicted label, number of images], the most frequent first, without those of no image."""
        counts = Counter(zip(self.labels.tolist(), self.scores.argmax(1).tolist()))
        return [[*pair, count] for pair, count in counts.most_common()]


def evaluate(job: ClassifierTraining, network: ClassifierNetwork, folds: int) -> Tested:
    """Test the classifier on the labeled test images, or else its like by cross-validation on the train images."""
    sets, nothing = job.sets, torch.empty(0, len(job.sets.classes))
    if not folds:
        return Tested(nothing, torch.empty(0, dtype=torch.int64), "not measured (folds = 0)")
    if sets.test is not None:
        assert sets.test.labels is not None
        return Tested(job.outputs(network, sets.test), sets.test.labels, "on labeled test images")
    parts = folds_of(sets.labels, folds, job.run.recipe.seed)
    if len(parts) < 2:
        return Tested(nothing, torch.empty(0, dtype=torch.int64), "no label has two images; label more")
    everyone = torch.arange(len(sets.train))
    scores = [job.held_out(job.train(everyone[~torch.isin(everyone, rows)]), rows) for rows in parts]
    return Tested(torch.cat(scores), sets.labels[torch.cat(parts)], f"by {len(parts)}-fold cross-validation")


def check_options(linear: bool, protocol: str, epochs: int, search: bool, cached: bool, folds: int) -> None:
    """Refuse options that contradict each other."""
    if epochs < 0 or folds < 0 or folds == 1:
        raise UsageError(f"epochs = {epochs}, folds = {folds}: give 0 or more epochs, and 0 or at least 2 folds")
    given = {"protocol": protocol != "sgd", "epochs": bool(epochs), "search": search, "cached": cached}
    if linear and any(given.values()):
        names = ", ".join(f"--{name}" for name, value in given.items() if value)
        raise UsageError(f"{names} is for training the whole network: leave out --linear, or these options")
    fine_tuning_named(protocol)


@dataclass(frozen=True)
class Saving:
    """What `save` writes."""

    out: Path
    run: Run
    settings: DataSettings
    sets: LabeledSets
    network: ClassifierNetwork
    facts: dict[str, Any]
    onnx: bytes | None
    seconds: float


def save(job: Saving) -> None:
    """Write the folder under another name and rename it, so that it is complete or absent."""
    encoder, layer = job.network.encoder.state_dict(), job.network.layer.state_dict()
    files = {"encoder.safetensors": checkpoints.to_safetensors(encoder)}
    files["classifier.safetensors"] = checkpoints.to_safetensors(layer)
    if job.onnx is not None:
        files["classifier.onnx"] = job.onnx
    facts = job.facts | {"sha256": sha256(files["classifier.safetensors"])}
    argv = shlex.join(["kontrast", *sys.argv[1:]])
    recipe = replace(job.run.recipe, data=job.settings)
    text = to_toml(recipe, argv)
    info = run_info(job, argv) | {"fingerprint": fingerprint(recipe), "data_place": place_of(job.settings.source)}
    info |= {"recipe_sha256": [sha256(text.encode("utf-8", "surrogateescape"))]}
    info |= {"encoder_sha256": sha256(files["encoder.safetensors"])}
    probes = [] if facts["accuracy"] is None else [facts["accuracy"]]
    trees = {"run.json": info, "classifier.json": facts, "probes.json": {"version": 1, "probes": probes}}
    files |= {name: (json.dumps(tree, indent=1, allow_nan=False) + "\n").encode() for name, tree in trees.items()}
    files["recipe.toml"] = text.encode("utf-8", "surrogateescape")
    files["labels.csv"] = labels_csv(job.sets)
    files["README.md"] = card(job.out.name, facts, info, job.run.transform(), job.run.channels).encode()
    with disk_faults(job.out):
        job.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(job.out, needed=sum(map(len, files.values()))) as place:
        for name, content in files.items():
            (place / name).write_bytes(content)


def run_info(job: Saving, argv: str) -> dict[str, Any]:
    """Return the entries of run.json, by which the folder can be opened as a run."""
    info, train = job.run.info, job.sets.train
    kept: dict[str, Any] = {key: info[key] for key in ("device", "precision", "steps") if key in info}
    data = {"name": train.name, "images": len(train), "classes": len(job.sets.classes), "channels": train.channels}
    data |= dtype_fact(train)
    # A run that has saved checkpoints and lost them is not resumed, so `pretrain --resume` does not overwrite this one.
    kept |= {"first_checkpoint": info.get("first_checkpoint", info.get("steps", 0))}
    kept |= {"version": VERSION, **checkpoints.versions(), "command": argv, "seconds": job.seconds}
    return kept | {"data": data, "pretrained": job.facts["pretrained"]["run"], "finished": timestamp()}


def labels_csv(sets: LabeledSets) -> bytes:
    """Return the labels that the classifier was trained on, as `--labels` takes them."""
    text = io.StringIO()
    rows = zip(map(str, sets.train.names), (sets.classes[i] for i in sets.labels.tolist()))
    csv.writer(text).writerows([("file", "label"), *rows])
    return text.getvalue().encode("utf-8", "surrogateescape")
