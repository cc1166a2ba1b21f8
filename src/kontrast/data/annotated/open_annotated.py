"""Decide what a source of annotated images is, and open one of its splits."""

from __future__ import annotations

import os
from pathlib import Path

from kontrast.data.annotated.annotated_images import AnnotatedImages
from kontrast.data.annotated.canvases import canvas_objects
from kontrast.data.annotated.coco_files import read_coco
from kontrast.data.annotated.voc_files import read_voc, voc_folders
from kontrast.data.listing import check_split
from kontrast.errors import DataError

EMBEDDED = "canvases"
SPLITS = {"train": ("train",), "test": ("val", "valid", "test")}
"""The words in the names of COCO's files and folders for each split."""
ALLOWED = "COCO (annotations/instances_train*.json) or VOC (Annotations/*.xml, JPEGImages/), or `canvases`"


def open_annotated(source: str | os.PathLike[str], split: str = "train", task: str = "boxes") -> AnnotatedImages:
    """Open a split of images with boxes, masks or keypoints.

    Args:
        source: "canvases" for the embedded set, or a folder in the layout of COCO or VOC.
        split: "train" or "test" (COCO's val).
        task: "boxes", "masks" or "keypoints": COCO has its keypoints in files of their own, and masks and keypoints
            must be there.

    Example:
        >>> len(open_annotated("canvases", "test"))
        256
    """
    check_split(os.fspath(source), split, ("train", "test"))
    images = _open(os.fspath(source), split, task)
    if task == "masks" and not images.has_masks:
        raise DataError(f"{images.source} has no masks: choose --task boxes, or COCO annotations with segmentations")
    if task == "keypoints" and images.keypoints is None:
        raise DataError(f"{images.source} has no keypoints: choose --task boxes, or COCO annotations with keypoints")
    return images


def _open(source: str, split: str, task: str) -> AnnotatedImages:
    root = Path(source)
    if source == EMBEDDED and not root.is_dir():
        return canvas_objects(split)
    if not root.is_dir():
        raise DataError(f"no folder {source!r}: give images annotated as {ALLOWED}")
    if file := _coco_file(root, split, task):
        return read_coco(file, _image_folder(root, file), split, source, task)
    if voc_folders(root):
        return read_voc(root, split, source)
    raise DataError(f"{source} has no annotations for split {split!r}: give images annotated as {ALLOWED}")


def _coco_file(root: Path, split: str, task: str) -> Path | None:
    """Return the COCO file of a split: for keypoints, one that is named after them comes first."""
    kinds = ("person_keypoints", "keypoints", "instances", "") if task == "keypoints" else ("instances", "")
    for word in SPLITS[split]:
        for kind in kinds:
            for path in sorted((root / "annotations").glob(f"{kind}*.json")):
                words = path.stem.lower().replace("-", "_").split("_")
                if any(part.rstrip("0123456789") == word for part in words):
                    return path
        if (path := root / word / "_annotations.coco.json").is_file():
            return path
    return None


def _image_folder(root: Path, file: Path) -> Path:
    """Return the folder of a COCO file's images: its own, or the one with the name of its split."""
    if file.name.startswith("_"):
        return file.parent
    named = [root / part for part in file.stem.split("_") if (root / part).is_dir()]
    inside = [root / "images" / part for part in file.stem.split("_") if (root / "images" / part).is_dir()]
    return next(iter([*named, *inside]), root / "images" if (root / "images").is_dir() else root)
