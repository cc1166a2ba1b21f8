"""Read and write COCO JSON: boxes, masks (polygons or run lengths) and keypoints.

    FOLDER/annotations/{instances,person_keypoints}_{train,val}*.json with FOLDER/{train,val}*/IMAGES
    FOLDER/{train,valid,test}/_annotations.coco.json beside its images

Annotations that can't be used are left out and listed; nothing in a file can name an image outside of its folder.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kontrast.data.annotated.annotated_images import AnnotatedImages, Keypoints
from kontrast.data.annotated.mask_codes import check_code, decode_mask, run_lengths
from kontrast.data.annotated.objects import Objects, no_objects
from kontrast.data.annotated.picture_files import FolderPictures, unusable
from kontrast.errors import DataError
from kontrast.files import read_bytes, write_atomic

PERSON = (
    "nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow",
    "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee", "left_ankle",
    "right_ankle",
)  # fmt: skip
PERSON_SIGMAS = (
    .026, .025, .025, .035, .035, .079, .079, .072, .072, .062, .062, .107, .107, .087, .087, .089, .089,
)  # fmt: skip
OTHER_SIGMA = 0.05
"""The deviation of keypoints that COCO has no measurement of."""
CUT = "boxes cut to their image"
WITHOUT_MASK = "objects without a mask are ignored"


@dataclass
class _Annotation:
    """One object as it was read: its box, label, whether it is a crowd, its code of a mask and its keypoints."""

    box: tuple[float, float, float, float]
    label: int
    crowd: bool
    code: Any = None
    points: list[float] | None = None
    area: float = 0.0


@dataclass
class _Document:
    """A COCO file as it was read."""

    names: list[str]
    sizes: list[tuple[int, int]]
    classes: tuple[str, ...]
    found: list[list[_Annotation]]
    keypoints: Keypoints | None
    bad: list[tuple[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


def read_coco(file: Path, folder: Path, split: str = "train", source: str = "", task: str = "boxes") -> AnnotatedImages:
    """Read a COCO file whose images are in a folder.

    Args:
        file: the JSON file.
        folder: the folder that its `file_name`s are relative to.
        split: the name of the split.
        source: the source as the user wrote it.
        task: "boxes", "masks" or "keypoints". For masks, an object without one is ignored.
    """
    try:
        tree = json.loads(read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not readable as JSON: {error}") from None
    read = _read_document(tree, file, folder)
    if not read.names:
        first = f", the first {read.bad[0][0]} ({read.bad[0][1]})" if read.bad else ""
        raise DataError(f"{file} has no usable image{first}: its images are looked for in {folder}")
    has_masks = any(one.code is not None for each in read.found for one in each)
    for one in (one for each in read.found for one in each if task == "masks" and one.code is None and not one.crowd):
        one.crowd = True
        read.notes[WITHOUT_MASK] += 1

    def objects(index: int, masks: bool) -> Objects:
        return _objects(read.found[index], read.sizes[index], masks and has_masks, read.keypoints)

    return AnnotatedImages(
        read.names, read.classes, FolderPictures(folder, read.names, read.sizes), objects, split, source or str(file),
        has_masks, read.keypoints, read.bad, dict(read.notes),
    )  # fmt: skip


def _objects(found: Sequence[_Annotation], size: tuple[int, int], masks: bool, points: Keypoints | None) -> Objects:
    if not found:
        return no_objects(len(points.names) if points else 0)
    decoded: Tensor | None = None
    if masks:
        decoded = torch.from_numpy(np.stack([_mask(one, size) for one in found]))
    keypoints = None
    if points is not None:
        none = [0.0] * (3 * len(points.names))
        keypoints = torch.tensor([a.points or none for a in found]).reshape(len(found), -1, 3)
    crowds, labels = torch.tensor([a.crowd for a in found]), torch.tensor([a.label for a in found])
    areas = torch.tensor([a.area for a in found])
    return Objects(torch.tensor([a.box for a in found]), labels, crowds, decoded, keypoints, areas, crowds)


def _mask(one: _Annotation, size: tuple[int, int]) -> np.ndarray:
    """Return the mask of an object; without one, that of a crowd is its box, and that of another object is empty."""
    if one.code is not None:
        return decode_mask(one.code, *size)
    mask = np.zeros(size, dtype=bool)
    if one.crowd:
        left, top, right, bottom = one.box
        mask[math.floor(top) : math.ceil(bottom), math.floor(left) : math.ceil(right)] = True
    return mask


def _read_document(tree: Any, file: Path, folder: Path) -> _Document:
    try:
        categories = sorted(tree["categories"], key=lambda one: one["id"])
        number = {int(one["id"]): i for i, one in enumerate(categories)}
        classes = tuple(str(one["name"]) for one in categories)
        images, annotations = list(tree["images"]), list(tree.get("annotations", ()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file} is not COCO JSON: it lacks a table of images or categories ({error!r})") from None
    read = _Document([], [], classes, [], _keypoints(categories))
    rows: dict[Any, int] = {}
    for image in images:
        problem = _image_problem(image, folder)
        if problem:
            read.bad.append((_name_of(image, "file_name"), problem))
            continue
        rows[image["id"]] = len(read.names)
        read.names.append(image["file_name"])
        read.sizes.append((int(image["height"]), int(image["width"])))
        read.found.append([])
    for annotation in annotations:
        image = annotation.get("image_id") if isinstance(annotation, dict) else None
        row = None if isinstance(image, list | dict) else rows.get(image)
        made: _Annotation | str = "its image is not listed or can't be read"
        if row is not None:
            made = _annotation(annotation, read.sizes[row], number, read)
        if isinstance(made, str):
            read.bad.append((f"annotation {_name_of(annotation, 'id')}", made))
        else:
            read.found[row].append(made)  # type: ignore[index]
    return read


def _name_of(entry: Any, key: str) -> str:
    return str(entry.get(key, "?"))[:200] if isinstance(entry, dict) else "?"


def _image_problem(image: Any, folder: Path) -> str:
    """Say why an entry of the table of images can't be used; "" if it can."""
    sides = [image.get(key) for key in ("height", "width")] if isinstance(image, dict) else []
    if not all(isinstance(side, int) and 0 < side < 65_536 for side in sides) or not sides:
        return "an image without height and width"
    name = image.get("file_name")
    if not isinstance(name, str) or not isinstance(image.get("id"), int | str):
        return "an image without file_name or id"
    return unusable(folder, name, (image["height"], image["width"]))


def _annotation(
    entry: dict[str, Any], size: tuple[int, int], number: dict[int, int], read: _Document
) -> _Annotation | str:
    """Read one annotation, or say why it can't be used."""
    box, category = entry.get("bbox"), entry.get("category_id")
    if isinstance(category, list | dict) or category not in number:
        return f"an unknown category {category!r}"
    label = number[category]
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(value) for value in box):
        return f"a box that is not four numbers: {str(box)[:60]}"
    height, width = size
    x, y, wide, high = map(float, box)
    if wide <= 0 or high <= 0:
        return f"a box without area: {box}"
    left, top, right, bottom = max(x, 0.0), max(y, 0.0), min(x + wide, float(width)), min(y + high, float(height))
    if right <= left or bottom <= top:
        return f"a box outside of the image: {box}"
    if (left, top, right, bottom) != (x, y, x + wide, y + high):
        read.notes[CUT] += max(left - x, top - y, x + wide - right, y + high - bottom) > 1  # less is rounding
    code, names = entry.get("segmentation") or None, read.keypoints.names if read.keypoints else ()
    points = (entry.get("keypoints") or None) if names else None  # without names, the box is still of use
    if code is not None and (problem := check_code(code, height, width)):
        return problem
    if points is not None and not _are_keypoints(points, len(names)):
        return "keypoints that are not x, y, visibility of each keypoint of its category"
    stated: Any = entry.get("area")
    area = float(stated) if _is_number(stated) and stated > 0 else (right - left) * (bottom - top)
    return _Annotation((left, top, right, bottom), label, bool(entry.get("iscrowd")), code, points, area)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e6


def _are_keypoints(points: Any, count: int) -> bool:
    fits = isinstance(points, list) and len(points) == 3 * count and all(map(_is_number, points))
    return fits and all(value in (0, 1, 2) for value in points[2::3])


def _keypoints(categories: Sequence[dict[str, Any]]) -> Keypoints | None:
    """Return the keypoints of the category that has any; all categories of a file share them."""
    lists = {tuple(map(str, one["keypoints"])) for one in categories if one.get("keypoints")}
    if len(lists) != 1:
        return None
    names = lists.pop()
    sides = {name: _other_side(name) for name in names}
    mirrored = tuple(names.index(sides[name]) if sides[name] in names else i for i, name in enumerate(names))
    return Keypoints(names, mirrored, PERSON_SIGMAS if names == PERSON else (OTHER_SIGMA,) * len(names))


def _other_side(name: str) -> str:
    parts = [
        {"left": "\0", "right": "left"}.get(p, p).replace("\0", "right") for p in name.replace("-", "_").split("_")
    ]
    return "_".join(parts)


def coco_tree(images: AnnotatedImages, masks: bool = True) -> dict[str, Any]:
    """Return the annotations of images as the tree of a COCO file; ids count from 1."""
    category: dict[str, Any] = {}
    if images.keypoints is not None:
        category = {"keypoints": list(images.keypoints.names), "skeleton": []}
    tree: dict[str, Any] = {"images": [], "annotations": [], "categories": []}
    tree["categories"] = [{"id": i + 1, "name": name, **category} for i, name in enumerate(images.classes)]
    for i, name in enumerate(images.names):
        found = images.objects(i, masks and images.has_masks)
        height, width = (
            images.pixels.sizes[i] if isinstance(images.pixels, FolderPictures) else images.pixels(i).shape[1:]
        )
        tree["images"].append({"id": i + 1, "file_name": name, "height": height, "width": width})
        for k in range(len(found)):
            entry = _entry(found, k, (height, width))
            tree["annotations"].append({"id": len(tree["annotations"]) + 1, "image_id": i + 1, **entry})
    return tree


def _entry(found: Objects, k: int, size: tuple[int, int]) -> dict[str, Any]:
    left, top, right, bottom = found.boxes[k].tolist()
    area = (right - left) * (bottom - top)
    entry: dict[str, Any] = {"category_id": int(found.labels[k]) + 1, "iscrowd": int(found.ignored[k])}
    if found.masks is not None:
        entry["segmentation"] = {"size": list(size), "counts": run_lengths(found.masks[k].numpy())}
        area = int(found.masks[k].sum())
    if found.stated is not None:
        area = float(found.stated[k])
    if found.keypoints is not None:
        entry["keypoints"] = found.keypoints[k].flatten().tolist()
        entry["num_keypoints"] = int((found.keypoints[k, :, 2] > 0).sum())
    return {**entry, "bbox": [left, top, right - left, bottom - top], "area": area}


def write_coco(images: AnnotatedImages, folder: str | Path) -> Path:
    """Write images as PNG files and their annotations as COCO JSON, in COCO's layout; returns the JSON file.

    Example:
        >>> import tempfile
        >>> from kontrast.data.annotated import canvas_objects
        >>> write_coco(canvas_objects("test").subset(range(2)), tempfile.mkdtemp()).name
        'instances_val.json'
    """
    from kontrast.data.annotated.picture_files import write_pictures

    split = {"test": "val"}.get(images.split, images.split)
    names = write_pictures(images, Path(folder) / split)
    tree = coco_tree(images)
    for image, name in zip(tree["images"], names):
        image["file_name"] = name
    file = Path(folder) / "annotations" / f"instances_{split}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(tree))
    return file
