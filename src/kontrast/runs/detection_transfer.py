"""Transfer to detection: train a detector on each encoder, with each seed, and measure its last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kontrast.data.annotated import AnnotatedImages, open_annotated
from kontrast.data.annotated.open_annotated import EMBEDDED
from kontrast.detection import (
    DetectionProtocol,
    Detections,
    build_detector,
    coco_scores,
    detection_protocol,
    voc_scores,
)
from kontrast.detection.coco_metrics import check_coco_package
from kontrast.errors import DataError, UsageError, printable
from kontrast.files import remove_folder
from kontrast.runs.detection_pictures import write_pictures
from kontrast.runs.detector_training import DetectorJob, detect, distinct_tensors, read_truth
from kontrast.runs.transfer_encoders import TRAINED, TransferEncoder
from kontrast.runs.transfer_jobs import own_part
from kontrast.runs.transfer_results import TransferResult, find_result, fingerprints, save_result
from kontrast.training import checkpoints
from kontrast.training.progress import Progress

FOLDER = "transfer"


@dataclass(frozen=True)
class DetectionTransfer:
    """A comparison of encoders in detection.

    Args:
        folder: the run folder that results and checkpoints are written to.
        data: the data as the user wrote it.
        task: "boxes", "masks" or "keypoints".
        name: the protocol's name.
        protocol: the protocol.
        share: the share of the training images whose labels are used.
        train: all training images with an object.
        test: the test images.
        device: where to train.
        say: receives lines.
    """

    folder: Path
    data: str
    task: str
    name: str
    protocol: DetectionProtocol
    share: float
    train: AnnotatedImages
    test: AnnotatedImages
    device: torch.device
    say: Callable[[str], None]

    def run(self, encoder: TransferEncoder, seed: int, fingerprint: str) -> TransferResult:
        """Train and measure one detector, or return what an earlier call found."""
        some = self.train.share(self.share, seed)
        decisive = {"data": fingerprint, "protocol": self.protocol.to_tree()}
        decisive |= {"task": self.task, "encoder": encoder.digest, "network": str(encoder.run.recipe.encoder)}
        digest, common = fingerprints(decisive, seed, images=list(some.names))
        known = find_result(self.folder, digest, common)
        if known is not None:
            return known
        start, model = time.monotonic(), self._build(encoder, seed)
        place = self.folder / FOLDER / f"{self.task}-{digest[:12]}"
        title = f"{self.task}, {Path(encoder.name).name}, seed {seed}"
        job = DetectorJob(self.protocol, self.task, some, place, digest, seed, self.device, title)
        job.train(model)
        if job.bad:
            name, reason = next(iter(job.bad.items()))
            first = f"the first is {printable(name)} ({reason})"
            self.say(f"{len(job.bad)} training images can't be used, others took their places: {first}")
        with Progress(f"test {title}", len(self.test)) as bar:
            found = detect(model, self.test, self.protocol, self.device, bar)
        scores = self.score(found)
        classes = {self.test.classes[i]: value for i, value in scores.pop("classes").items()}
        facts = {"train_images": len(some), "test_images": len(self.test), "metric": self.protocol.metric,
                 "steps": self.protocol.steps, "unreadable_train_images": len(job.bad), "AP50_by_class": classes,
                 "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
        if encoder.name == TRAINED:
            write_pictures(self.folder, self.task, self.test, found)
        checkpoints.write_weights(place / "detector.safetensors", distinct_tensors(model))
        amount = f"{100 * self.share:g}% ({len(some)})"
        result = TransferResult(self.task, self.data, encoder.name, self.name, amount, seed, "AP", scores["AP"], scores,
                                facts, digest, common)  # fmt: skip
        save_result(self.folder, result)
        remove_folder(place / "checkpoints")  # the weights are kept without the momenta
        return result

    def _build(self, encoder: TransferEncoder, seed: int) -> Any:
        mean, std = encoder.normalization()
        points = len(self.train.keypoints.names) if self.train.keypoints else 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_detector(
                encoder.build(seed), len(self.train.classes), self.protocol, task=self.task, keypoints=points,
                mean=mean, std=std,
            )  # fmt: skip
        return model.to(self.device)

    def score(self, found: Sequence[Detections]) -> dict[str, Any]:
        """Measure detections in the test images by the protocol's metric."""
        if self.protocol.metric == "coco":
            return coco_scores(found, self.test, task=self.task)
        sigmas = self.test.keypoints.sigmas if self.test.keypoints else ()
        return voc_scores(found, read_truth(self.test, self.task), task=self.task, sigmas=sigmas)


def transfer_to_detection(
    folder: Path,
    encoders: Sequence[TransferEncoder],
    data: str,
    *,
    task: str,
    protocol: str,
    overrides: Any,
    labels: float,
    seeds: int,
    device: torch.device,
    say: Callable[[str], None],
) -> list[TransferResult]:
    """Train a detector on every encoder with every seed; see `kontrast.transfer`."""
    name = protocol or (EMBEDDED if data == EMBEDDED else "folder")
    settings = detection_protocol(name, overrides)
    if not 0 < labels <= 1:
        raise UsageError(f"labels = {labels:g}: give a share of the training labels above 0 and up to 1")
    if settings.metric == "coco":
        check_coco_package()
    train, test = open_annotated(data, "train", task), open_annotated(data, "test", task)
    with Progress("decode the test images once", len(test)) as bar:  # damage must not end hours of training
        test = test.without_unreadable(bar.advance)
    for part in (train, test):
        if line := part.skipped():
            say(line)
    if train.classes != test.classes:
        raise DataError(f"{data} has other classes for training ({len(train.classes)}) than for tests")
    useful = train.for_training(keypoints=task == "keypoints")
    if not len(useful) or not len(test):
        raise DataError(f"{data} has {len(useful)} training images with objects and {len(test)} test images: give both")
    job = DetectionTransfer(folder, data, task, name, settings, labels, useful, test, device, say)
    fingerprint = f"{useful.fingerprint} {test.fingerprint}"
    cases = [(encoder, seed) for seed in range(seeds) for encoder in encoders]
    return [job.run(encoder, seed, fingerprint) for encoder, seed in own_part(cases)]
