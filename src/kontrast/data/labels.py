"""Read the labels of images from a CSV file."""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Collection
from pathlib import Path

import torch

from kontrast.data.image_set import ImageSet
from kontrast.errors import DataError

NAMES = ("name", "names", "path", "file", "filename", "file_name", "filepath", "image", "img", "id", "image_id")
LABELS = ("label", "labels", "class", "category", "target", "y")
"""Words in a heading by which it is recognized."""
LONGEST = 100
"""A label with more digits is not read as a number: Python refuses thousands of digits."""


def read_labels(images: ImageSet, path: str | Path, some: bool = False) -> ImageSet:
    """Give images the labels in a CSV file.

    Args:
        images: the images; every one needs a row, unless `some` is set.
        path: a CSV file with rows `name,label` and perhaps a heading. Rows of other images are ignored, so that one
            file can have the labels of both train and test.
        some: allow images without a row or with an empty label. Their label becomes -1.

    Returns:
        The images with labels and class names; classes are sorted, numbers first.
    """
    given = labels_of(path, known=set(images.names), some=some)
    missing = [name for name in images.names if name not in given]
    if missing and not some:
        raise DataError(f"{path} has no label for {len(missing)} of {len(images)} images, the first {missing[0]!r}")
    if len(missing) == len(images):
        rows = (
            f"it labels {len(given):,} others, the first {next(iter(given))!r}"
            if given
            else "its label column is empty"
        )
        raise DataError(f"{path} labels no image of {images.name}, such as {missing[0]!r}: {rows}")
    classes = sorted(set(given.values()), key=_order)
    if len(classes) < 2:
        raise DataError(f"{path} has one class, {classes[0]!r}: a probe needs two or more")
    number = {name: i for i, name in enumerate(classes)}
    labels = torch.tensor([number[given[name]] if name in given else -1 for name in images.names])
    return dataclasses.replace(images, labels=labels, classes=classes)


def labels_of(path: str | os.PathLike[str], known: Collection[str] = (), some: bool = False) -> dict[str, str]:
    """Return the label of each name in a CSV file.

    Args:
        path: a CSV file with rows `name,label` and perhaps a heading.
        known: names of images, by which a first row is told from a heading.
        some: leave rows with an empty label out instead of refusing them.
    """
    rows = _rows(Path(path))
    first = [cell.strip().lower() for cell in rows[0]]
    if rows[0][0] not in known and (first[0] in NAMES or first[1] in LABELS):
        rows = rows[1:]
    given: dict[str, str] = {}
    for name, label in rows:
        if some and not label.strip():
            continue
        if not label.strip() or given.setdefault(name, label) != label:
            problem = f"two labels, {given[name]!r} and {label!r}: keep one" if label.strip() else "an empty label"
            raise DataError(f"{path} gives {name!r} {problem}")
    return given


def _order(label: str) -> tuple[bool, int, str]:
    """Sort numbers by value, then words; "²" and numbers with very many digits count as words."""
    number = label.isdecimal() and len(label) <= LONGEST
    return not number, int(label) if number else 0, label


def _rows(path: Path) -> list[tuple[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, csv.Error) as error:
        raise DataError(f"can't read the labels {path}: {error}") from None
    short = next((n for n, row in enumerate(rows, 1) if len(row) < 2), None if rows else 1)
    if short:
        raise DataError(f"{path}, row {short}: needs two columns, name and label")
    return [(row[0], row[1]) for row in rows]


SEPARATOR = "|"
"""Separates the labels of an image that has several."""


def read_label_sets(images: ImageSet, path: str | Path) -> tuple[torch.Tensor, list[str]]:
    """Read the labels of images that may have several each.

    Args:
        images: the images.
        path: a CSV file with rows `name,label`: several labels are separated by "|" or given in several rows, and an
            image without any row has none of the classes.

    Returns:
        0 and 1 for each image and class, float32 [N,C], and the names of the classes.
    """
    rows = _rows(Path(path))
    names = set(images.names)
    first = [cell.strip().lower() for cell in rows[0]]
    rows = rows[1:] if rows[0][0] not in names and (first[0] in NAMES or first[1] in LABELS) else rows
    given: dict[str, set[str]] = {}
    for name, labels in rows:
        given.setdefault(name, set()).update(label.strip() for label in labels.split(SEPARATOR) if label.strip())
    if not names & set(given):
        raise DataError(f"{path} has no label for any of the images: its names are looked for in {images.name}")
    classes = sorted({label for labels in given.values() for label in labels}, key=_order)
    number = {name: i for i, name in enumerate(classes)}
    hot = torch.zeros(len(images), len(classes))
    for row, name in enumerate(images.names):
        hot[row, [number[label] for label in given.get(name, ())]] = 1
    return hot, classes


def has_label_sets(path: str | Path) -> bool:
    """Whether a CSV file gives some image several labels."""
    rows = _rows(Path(path))
    return len({name for name, _ in rows}) < len(rows) or any(SEPARATOR in label for _, label in rows)
