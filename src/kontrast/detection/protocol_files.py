"""Protocols of detection: one TOML file per row of a paper's table, read strictly into `DetectionProtocol`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kontrast.config.overrides import Overrides, apply_overrides
from kontrast.config.recipe import read_settings
from kontrast.config.recipe_files import recipe_text
from kontrast.config.toml import parse_toml
from kontrast.errors import UsageError
from kontrast.optim import learning_rate
from kontrast.registry import nearest

FOLDER = Path(__file__).parent / "protocols"
POSITIVE = (
    "steps", "batch", "channels", "head_width", "test_side", "longest", "proposals", "regions", "detections",
    "mask_layers", "keypoint_layers",
)  # fmt: skip
"""The settings that are at least 1."""


@dataclass(frozen=True)
class DetectionProtocol:
    """How a detector is built, trained and measured.

    Args:
        title: one line about the protocol.
        neck: "fpn" (a feature pyramid on all stages) or "c4" (the heads share the last stage).
        norm: the encoder's batch norm: "sync" (trained, over all ranks), "trained" or "frozen".
        neck_norm: batch norm in the pyramid, or after the last stage of C4.
        frozen_stages: how many stages of the encoder, counted with its stem, are not trained.
        channels: channels of the pyramid and of the heads of masks.
        head_width: width of the head of boxes (FPN).
        mask_layers: convolutions of the head of masks (FPN).
        keypoint_layers: convolutions of the head of keypoints (FPN).
        anchor_scale: size of the anchors as a multiple of the stride of their map; C4: 1/4 of the smallest of five.
        proposals: regions per image that are proposed in tests; twice as many are in training.
        regions: regions per image that train the heads.
        detections: the most detections per image.
        steps: training steps.
        batch: images per step.
        lr: peak learning rate.
        schedule: "steps" or "cosine".
        warmup: steps of linear warm-up.
        milestones: steps at which the rate is multiplied by 0.1.
        momentum: momentum of SGD.
        weight_decay: weight decay of all but norms.
        norm_decay: weight decay of norms.
        short_sides: lengths of the shorter side of training images, one of which is drawn for each.
        test_side: length of the shorter side of test images.
        longest: the most that the longer side may have.
        flip: probability that a training image is mirrored.
        crop: least share of the area of a training image that a random window keeps; 1 for no cropping.
        metric: "voc" or "coco", which needs faster-coco-eval.

    Example:
        >>> protocol = detection_protocol("cacr-voc")
        >>> [round(protocol.rate(step), 6) for step in (0, 100, 18_000, 22_000)]
        [0.0002, 0.02, 0.002, 0.0002]
    """

    title: str = ""
    neck: Literal["fpn", "c4"] = "fpn"
    norm: Literal["sync", "trained", "frozen"] = "sync"
    neck_norm: bool = True
    frozen_stages: int = 0
    channels: int = 256
    head_width: int = 1024
    mask_layers: int = 4
    keypoint_layers: int = 8
    anchor_scale: float = 8.0
    proposals: int = 1000
    regions: int = 512
    detections: int = 100
    steps: int = 90_000
    batch: int = 16
    lr: float = 0.02
    schedule: Literal["steps", "cosine"] = "steps"
    warmup: int = 1000
    milestones: tuple[float, ...] = ()
    momentum: float = 0.9
    weight_decay: float = 1e-4
    norm_decay: float = 0.0
    short_sides: tuple[float, ...] = (640.0, 672.0, 704.0, 736.0, 768.0, 800.0)
    test_side: int = 800
    longest: int = 1333
    flip: float = 0.5
    crop: float = 1.0
    metric: Literal["voc", "coco"] = "coco"

    def __post_init__(self) -> None:
        wrong = [key for key in POSITIVE if getattr(self, key) < 1]
        if wrong or not self.short_sides or min(self.short_sides) < 1:
            raise UsageError(f"{wrong[0] if wrong else 'short_sides'} must be at least 1")
        if not (0 <= self.flip <= 1 and 0 < self.crop <= 1):
            raise UsageError(f"flip = {self.flip:g}, crop = {self.crop:g}: give a probability, and a share above 0")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return learning_rate(
            step, lr=self.lr, epochs=self.steps, steps_per_epoch=1, schedule=self.schedule, warmup=self.warmup,
            milestones=self.milestones,
        )  # fmt: skip

    def to_tree(self) -> dict[str, Any]:
        """Return all settings as plain values."""
        tree = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in tree.items()}


def protocol_names() -> tuple[str, ...]:
    """Return the names of the protocols in the package.

    Example:
        >>> protocol_names()
        ('cacr-coco', 'cacr-voc', 'canvases', 'folder', 'jcl-coco')
    """
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def detection_protocol(name: str, overrides: Overrides = ()) -> DetectionProtocol:
    """Return a protocol by its name in the package or the path of a .toml file, with settings replaced.

    Args:
        name: one of `protocol_names()`, or a path.
        overrides: `key=value` texts or a mapping.

    Example:
        >>> detection_protocol("canvases", {"steps": 5}).steps
        5
    """
    path = FOLDER / f"{name}.toml" if name in protocol_names() else Path(name)
    if not path.name.endswith(".toml") or not path.is_file():
        raise UsageError(f"unknown protocol {name!r}: {nearest(name, protocol_names())}, or a .toml file")
    tree = apply_overrides(parse_toml(recipe_text(path), f"protocol {name!r}"), overrides)
    return read_settings(DetectionProtocol, tree, f"protocol {name!r}")
