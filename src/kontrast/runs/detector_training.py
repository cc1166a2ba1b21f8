"""Train a detector and measure it; both go on where a killed process stopped.

Every draw (batches, mirroring, windows, regions) is a function of the seed and the step, so an interrupted training
ends with the same weights as one that was not.
"""

from __future__ import annotations

import functools
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kontrast.addresses import shown
from kontrast.counters import permutation, uniform, words
from kontrast.data.annotated import AnnotatedImages, Objects, crop, flip
from kontrast.data.annotated.annotated_images import READERS, UnreadablePicture
from kontrast.detection import DetectionProtocol, Detections
from kontrast.detection.detections import detections_of
from kontrast.detection.detectors import set_mode
from kontrast.errors import DataError, NumbersError
from kontrast.files import JsonLines
from kontrast.networks.batch_norm import BatchNorm
from kontrast.training import checkpoints
from kontrast.training.progress import Progress
from kontrast.training.signals import StopSignals

SAVE_SECONDS = 60.0
"""The least time between two checkpoints."""
LOG_EVERY = 20
_WINDOW = 26
"""The stream of counters of this file."""


@dataclass(frozen=True)
class DetectorJob:
    """One training of a detector.

    Args:
        protocol: how to train.
        task: "boxes", "masks" or "keypoints".
        images: the training images.
        folder: where its checkpoints and losses are.
        fingerprint: what a checkpoint must have been made from.
        seed: the seed of all draws.
        device: where to train.
        title: the title of its progress bar.
        bad: the training images that could not be read, with the reason; training adds them.
    """

    protocol: DetectionProtocol
    task: str
    images: AnnotatedImages
    folder: Path
    fingerprint: str
    seed: int
    device: torch.device
    title: str
    bad: dict[str, str] = field(default_factory=dict)

    def train(self, model: Any) -> None:
        """Train the model in place, from its newest checkpoint if there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        optimizer = sgd(model, self.protocol)
        step = self._restore(model, optimizer)
        if step == self.protocol.steps:
            return
        log = JsonLines(self.folder / "metrics.jsonl")
        log.open(keep_until_step=step)
        set_mode(model, self.protocol, training=True)
        devices = [self.device] if self.device.type == "cuda" else []
        title, total = self.title, self.protocol.steps
        try:
            with (
                StopSignals() as stop,
                torch.random.fork_rng(devices),
                Progress(title, total, done=step, unit="steps") as bar,
            ):
                stop.patient = True
                saved = time.monotonic()
                for images, targets in self._batches(step):
                    loss = self._step(model, optimizer, images, targets, step)
                    step += 1
                    bar.advance(1)
                    if step % LOG_EVERY == 0 or step == total:
                        log.write(step=step, loss=self._checked(loss, step), lr=self.protocol.rate(step - 1))
                        bar.advance(0, loss=float(loss))
                    if step == total or stop.signal is not None or time.monotonic() - saved > SAVE_SECONDS:
                        log.sync()
                        self._save(model, optimizer, step)
                        saved = time.monotonic()
                    if stop.signal is not None and step < total:
                        raise stop.error(f"step {step} of {total}", shlex.join(["kontrast", *map(shown, sys.argv[1:])]))
        finally:
            log.close()

    def _step(self, model: Any, optimizer: torch.optim.Optimizer, images: Any, targets: Any, step: int) -> Tensor:
        torch.manual_seed(int(words(1, self.seed, _WINDOW, step)[0] >> 1))  # the detector draws regions and sizes
        for group in optimizer.param_groups:
            group["lr"] = self.protocol.rate(step)
        moved = [{key: value.to(self.device) for key, value in one.items()} for one in targets]
        losses = model([image.to(self.device).float() / 255 for image in images], moved)
        loss: Tensor = sum(losses.values())  # type: ignore[assignment]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def _checked(self, loss: Tensor, step: int) -> float:
        value = float(loss)
        if not torch.isfinite(loss):
            raise NumbersError(f"the loss of the detector is {value} at step {step}: lower lr, or lengthen warmup")
        return value

    def _batches(self, start: int) -> Iterator[tuple[list[Tensor], list[dict[str, Tensor]]]]:
        """Yield the batches of the steps from `start`; the next one is read while a step is computed."""
        size, total = self.protocol.batch, self.protocol.steps
        with ThreadPoolExecutor(READERS) as readers:

            def ask(step: int) -> list[Future[tuple[Tensor, dict[str, Tensor]]]]:
                return [readers.submit(self._read, step * size + j) for j in range(size)]

            following = ask(start)
            for step in range(start, total):
                current, following = following, ask(step + 1) if step + 1 < total else []
                images, targets = zip(*(one.result() for one in current))
                yield list(images), list(targets)

    def _read(self, place: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the image at a place of the endless sequence of shuffled epochs, augmented, and its target."""
        image, objects = self._next_readable(place)
        objects = objects.take(~objects.ignored)
        mirror, area, ratio, down, across = uniform(5, self.seed, _WINDOW, 2, place).tolist()
        if self.protocol.crop < 1:
            share = self.protocol.crop + (1 - self.protocol.crop) * area
            image, objects = _window(image, objects, share, (4 / 3) ** (2 * ratio - 1), down, across)
        if mirror < self.protocol.flip:
            points = self.images.keypoints
            image, objects = flip(image, objects, points.mirrored if points else None)
        return image, target_of(objects)

    def _next_readable(self, place: int) -> tuple[Tensor, Objects]:
        """Return the image at a place, or the next one of its epoch that can be read; note those that can't."""
        epoch, row = divmod(place, len(self.images))
        order = _order(len(self.images), self.seed, epoch)
        for k in range(row, row + len(order)):
            try:
                return self.images.read(int(order[k % len(order)]), masks=self.task == "masks")
            except UnreadablePicture as error:
                self.bad[error.name] = error.reason
        name, reason = next(iter(self.bad.items()))
        raise DataError(f"none of the {len(order)} training images can be read, the first is {name} ({reason})")

    def _save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in distinct_tensors(model).items()}
        for name, parameter in model.named_parameters():
            if "momentum_buffer" in optimizer.state[parameter]:
                tensors[f"momentum.{name}"] = optimizer.state[parameter]["momentum_buffer"]
        folder = self.folder / "checkpoints"
        state, made_by = {"step": step, "bad": self.bad}, {"recipe": self.fingerprint, **checkpoints.versions()}
        checkpoints.save(folder, step, tensors, state, made_by)
        checkpoints.prune(folder, keep=1)

    def _restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest checkpoint, and return the step that it was made after; 0 if there is none."""
        found = checkpoints.newest(self.folder / "checkpoints", recipe=self.fingerprint)
        if found is None:
            return 0
        tensors, state, _ = found
        model.load_state_dict(checkpoints.under("model", tensors), strict=False)  # without the names left out below
        momenta = checkpoints.under("momentum", tensors)
        for name, parameter in model.named_parameters():
            if name in momenta:
                optimizer.state[parameter]["momentum_buffer"] = momenta[name].to(parameter.device)
        self.bad.update(state.get("bad", {}))
        return int(state["step"])


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the images of an epoch."""
    return permutation(count, seed, _WINDOW, 1, epoch)


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state without the second names of tensors: the heads of a C4 detector share a stage."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def sgd(model: nn.Module, protocol: DetectionProtocol) -> torch.optim.Optimizer:
    """Return SGD with momentum on all trainable parameters; norms have a weight decay of their own."""
    norms = {id(p) for m in model.modules() if isinstance(m, BatchNorm) for p in m.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in norms], "weight_decay": protocol.weight_decay},
        {"params": [p for p in trained if id(p) in norms], "weight_decay": protocol.norm_decay},
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=protocol.lr, momentum=protocol.momentum)


def target_of(objects: Objects) -> dict[str, Tensor]:
    """Return objects as torchvision's detectors take them: labels count from 1, since 0 is the background."""
    target = {"boxes": objects.boxes, "labels": objects.labels + 1}
    if objects.masks is not None:
        target["masks"] = objects.masks.to(torch.uint8)
    if objects.keypoints is not None:
        points = objects.keypoints.clone()
        points[:, :, 2] = (points[:, :, 2] > 0).float()
        target["keypoints"] = points
    return target


def _window(
    image: Tensor, objects: Objects, share: float, stretch: float, down: float, across: float
) -> tuple[Tensor, Objects]:
    """Cut a random window out of an image; the whole image if no object would be left."""
    height, width = image.shape[1:]
    high = min(height, max(1, round(height * (share / stretch) ** 0.5)))
    wide = min(width, max(1, round(width * (share * stretch) ** 0.5)))
    top, left = int(down * (height - high + 1)), int(across * (width - wide + 1))
    found = crop(image, objects, top, left, high, wide, least=0.3)
    return found if len(found[1]) else (image, objects)


@torch.no_grad()
def detect(
    model: Any, images: AnnotatedImages, protocol: DetectionProtocol, device: torch.device, bar: Progress | None = None
) -> list[Detections]:
    """Return what a detector finds in each image."""
    set_mode(model, protocol, training=False)
    found: list[Detections] = []
    with ThreadPoolExecutor(READERS) as readers:
        for start in range(0, len(images), protocol.batch):
            pixels = list(readers.map(images.pixels, range(start, min(start + protocol.batch, len(images)))))
            outputs = model([one.to(device).float() / 255 for one in pixels])
            found += [detections_of(out, *one.shape[1:]) for out, one in zip(outputs, pixels)]
            if bar is not None:
                bar.advance(len(pixels))
    return found


def read_truth(images: AnnotatedImages, task: str) -> Sequence[Objects]:
    """Return the objects of all images, with masks for the task "masks" alone.

    For the task "keypoints" an object without annotated keypoints is ignored like a crowd, as in COCO's evaluation.
    """
    found = [images.objects(i, task == "masks") for i in range(len(images))]
    return [without_points_ignored(one) for one in found] if task == "keypoints" else found


def without_points_ignored(objects: Objects) -> Objects:
    """Return the objects, of which those without annotated keypoints are ignored like crowds."""
    assert objects.keypoints is not None
    nothing = ~(objects.keypoints[:, :, 2] > 0).any(1)
    crowds = nothing if objects.crowds is None else objects.crowds | nothing
    return replace(objects, ignored=objects.ignored | nothing, crowds=crowds)
