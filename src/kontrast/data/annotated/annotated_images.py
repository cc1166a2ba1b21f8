"""A split of images with annotated objects, read when they are needed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kontrast.counters import permutation
from kontrast.data.annotated.objects import Objects
from kontrast.errors import DataError, printable

READERS = 8
"""Threads that decode images at once."""


class UnreadablePicture(DataError):
    """An image file that is damaged, or does not fit its annotations."""

    def __init__(self, path: Path, name: str, reason: str):
        super().__init__(f"can't use the image {path}: {reason}")
        self.name, self.reason = name, reason


@dataclass(frozen=True)
class Keypoints:
    """The keypoints of a set's objects.

    Args:
        names: their P names.
        mirrored: for each keypoint the one that takes its place in a mirrored image: left for right.
        sigmas: how far annotators differ, as a share of the object's size, for COCO's similarity of keypoints.
    """

    names: tuple[str, ...]
    mirrored: tuple[int, ...]
    sigmas: tuple[float, ...]


@dataclass(frozen=True)
class AnnotatedImages:
    """One split of images with objects; `images.read(i)` decodes one image with its objects.

    Args:
        names: N names, the files relative to the source.
        classes: the names of the labels.
        pixels: returns the image at a position, uint8 [3,H,W].
        objects: returns the objects of the image at a position, with masks if its second argument is true.
        split: "train" or "test".
        source: the source as the user wrote it.
        has_masks: whether the objects have masks.
        keypoints: the keypoints of the objects, or None.
        bad: (name, reason) of annotations that are left out.
        notes: how many annotations were changed, by what was changed.
    """

    names: Sequence[str]
    classes: tuple[str, ...]
    pixels: Callable[[int], Tensor]
    objects: Callable[[int, bool], Objects]
    split: str = "train"
    source: str = ""
    has_masks: bool = False
    keypoints: Keypoints | None = None
    bad: Sequence[tuple[str, str]] = ()
    notes: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int, masks: bool = False) -> tuple[Tensor, Objects]:
        """Return the image at a position, uint8 [3,H,W], and its objects."""
        return self.pixels(index), self.objects(index, masks)

    def subset(self, positions: Sequence[int]) -> AnnotatedImages:
        """Return the images at these positions, in this order."""
        rows = [range(len(self))[i] for i in positions]
        return dataclasses.replace(
            self,
            names=[self.names[i] for i in rows],
            pixels=lambda i: self.pixels(rows[i]),
            objects=lambda i, masks: self.objects(rows[i], masks),
        )

    def for_training(self, keypoints: bool = False) -> AnnotatedImages:
        """Return the images with an object to train on, or with an annotated keypoint."""

        def useful(found: Objects) -> bool:
            if keypoints and found.keypoints is not None:
                return bool((found.keypoints[~found.ignored][:, :, 2] > 0).any())
            return bool((~found.ignored).any())

        return self.subset([i for i in range(len(self)) if useful(self.objects(i, False))])

    def without_unreadable(self, advance: Callable[[int], None]) -> AnnotatedImages:
        """Decode all images, and return those that can be decoded; the others are then among the bad ones.

        advance: called after each image with 1.
        """

        def look(index: int) -> tuple[str, str] | None:
            try:
                self.pixels(index)
            except UnreadablePicture as error:
                return error.name, error.reason
            finally:
                advance(1)
            return None

        with ThreadPoolExecutor(READERS) as readers:
            found = list(readers.map(look, range(len(self))))
        if not any(found):
            return self
        kept = self.subset([i for i, problem in enumerate(found) if problem is None])
        return dataclasses.replace(kept, bad=[*self.bad, *filter(None, found)])

    def share(self, share: float, seed: int) -> AnnotatedImages:
        """Return a random share of the images, at least one; a larger share of the same seed contains it."""
        order = permutation(len(self), seed, 26)
        return self.subset(sorted(order[: max(1, round(share * len(self)))].tolist()))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the names, classes and objects (without masks): changes with every edit of the annotations."""
        digest = hashlib.sha256("\0".join([*self.classes, "", *self.names]).encode("utf-8", "surrogatepass"))
        for i in range(len(self)):
            found = self.objects(i, False)
            for values in (found.boxes, found.labels, found.ignored, found.keypoints):
                if values is not None:
                    digest.update(values.numpy().tobytes())
        return digest.hexdigest()

    def skipped(self) -> str:
        """Return a line on the images and annotations that are left out or changed; empty if there are none."""
        parts = [f"{count} {what}" for what, count in self.notes.items() if count]
        if self.bad:
            shown = ", ".join(f"{printable(name)} ({reason})" for name, reason in self.bad[:3])
            parts.insert(
                0, f"left out {len(self.bad)} bad images or annotations: {shown}{' ...' if len(self.bad) > 3 else ''}"
            )
        return f"{self.source} {self.split}: {'; '.join(parts)}" if parts else ""


def stored(images: Tensor, objects: Sequence[Objects], **settings: object) -> AnnotatedImages:
    """Return images in memory, uint8 [N,3,H,W], with their objects."""

    def found(index: int, masks: bool) -> Objects:
        one = objects[index]
        return one if masks else dataclasses.replace(one, masks=None)

    has_masks = len(objects) > 0 and objects[0].masks is not None
    return AnnotatedImages(
        pixels=lambda i: torch.as_tensor(images[i]), objects=found, has_masks=has_masks, **settings,  # type: ignore[arg-type]
    )  # fmt: skip
