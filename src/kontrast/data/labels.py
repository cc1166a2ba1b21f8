"""Read the labels of images from a CSV file."""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from unicodedata import normalize

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
        path: a CSV file with rows `name,label`, or with a heading that names these columns. Rows of other images are
            ignored, so that one file can have the labels of both train and test.
        some: allow images without a row or with an empty label. Their label becomes -1.

    Returns:
        The images with labels and class names; classes are sorted, numbers first.
    """
    known = set(images.names)
    given = labels_of(path, known=known, some=some)
    missing = [name for name in images.names if name not in given]
    others = [name for name in given if name not in known]
    if missing and not some:
        problem = f"has no label for {len(missing)} of {len(images)} images, the first {missing[0]!r}"
        raise DataError(f"{path} {problem}{_encoding(others)}")
    if len(missing) == len(images):
        rows = f"it labels {len(others):,} others, the first {others[0]!r}" if others else "its label column is empty"
        raise DataError(f"{path} labels no image of {images.name}, such as {missing[0]!r}: {rows}{_encoding(others)}")
    classes = _sorted_classes(given.values(), path)
    if len(classes) < 2:
        raise DataError(f"{path} has one class, {classes[0]!r}: a probe needs two or more")
    number = {name: i for i, name in enumerate(classes)}
    labels = torch.tensor([number[given[name]] if name in given else -1 for name in images.names])
    return dataclasses.replace(images, labels=labels, classes=classes)


def labels_of(path: str | os.PathLike[str], known: Collection[str] = (), some: bool = False) -> dict[str, str]:
    """Return the label of each name in a CSV file.

    Args:
        path: a CSV file with rows `name,label`, or with a heading that names these columns.
        known: names of images, by which a first row is told from a heading. The same name with other spaces around it
            or in another Unicode form, such as that of macOS, is returned as it is here.
        some: leave rows with an empty label out instead of refusing them.
    """
    given: dict[str, str] = {}
    for name, label in _rows(Path(path), known):
        if some and not label:
            continue
        if not label or given.setdefault(name, label) != label:
            problem = f"two labels, {given[name]!r} and {label!r}: keep one" if label else "an empty label"
            raise DataError(f"{path} gives {name!r} {problem}")
    return given


def unknown_names(path: str | os.PathLike[str], known: Collection[str], what: str = "no image") -> str:
    """Return a line about labels that are lost because their rows name no known image; "" if there are none.

    Args:
        path: a CSV file as in `labels_of`.
        known: names of images.
        what: what those rows name.
    """
    given = labels_of(path, known, some=True)
    others = [name for name in given if name not in known]
    if not others:
        return ""
    line = f"{path}: {len(others):,} of {len(given):,} rows name {what}, the first {others[0]!r}"
    lost = set(given.values()) - {label for name, label in given.items() if name in known}
    if lost:
        line += f"; no image has the label {' or '.join(map(repr, sorted(lost, key=_order)))}"
    return line + _encoding(others)


def _encoding(names: list[str]) -> str:
    """Say that a file with these names is not UTF-8, if it is not."""
    return "" if all(map(_is_utf8, names)) else "; the file is not valid UTF-8: save it as UTF-8"


def _is_utf8(text: str) -> bool:
    return not any("\udc80" <= c <= "\udcff" for c in text)


def _sorted_classes(labels: Iterable[str], path: str | os.PathLike[str]) -> list[str]:
    classes = sorted(set(labels), key=_order)
    if wrong := [label for label in classes if not _is_utf8(label)]:
        raise DataError(f"{path}: the label {wrong[0]!r} is not valid UTF-8: save the file as UTF-8")
    return classes


def _order(label: str) -> tuple[bool, int, str]:
    """Sort numbers by value, then words; "²" and numbers with very many digits count as words."""
    number = label.isdecimal() and len(label) <= LONGEST
    return not number, int(label) if number else 0, label


def _rows(path: Path, known: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return name and label of each row below the heading, names as they are known, labels without spaces around."""
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, csv.Error) as error:
        raise DataError(f"can't read the labels {path}: {error}") from None
    short = next((n for n, row in enumerate(rows, 1) if len(row) < 2), None if rows else 1)
    if short:
        raise DataError(f"{path}, row {short}: needs two columns, name and label")
    columns = None if any(cell in known for cell in rows[0]) else _columns(rows[0], path)
    name, label = columns or (0, 1)
    short = next((n for n, row in enumerate(rows, 1) if len(row) <= max(name, label)), None)
    if short:
        raise DataError(f"{path}, row {short}: has fewer columns than the heading")
    pairs = [(row[name], row[label].strip()) for row in rows]
    (first, word), *others = _as_known(pairs, known)
    # A heading in other words names no image, unlike the rows below, and no class of theirs.
    is_heading = columns is not None or (
        first not in known and any(one in known for one, _ in others) and all(label != word for _, label in others)
    )
    return others if is_heading else [(first, word), *others]


def _columns(heading: list[str], path: Path) -> tuple[int, int] | None:
    """Return the numbers of the columns of names and labels in a heading, or None if it has no word for either."""
    words = [cell.strip().lower() for cell in heading]
    name, label = (next((words.index(word) for word in known if word in words), None) for known in (NAMES, LABELS))
    if label is not None:
        return (1 if label == 0 else 0) if name is None else name, label
    if name is None:
        return None
    if len(words) == 2 and set(words) <= set(NAMES):  # such as image,name
        return 0, 1
    if len(words) > 2:
        raise DataError(f"{path} has the columns {', '.join(heading)}: give that of the labels the heading label")
    return name, 1 - name


def _as_known(pairs: list[tuple[str, str]], known: Collection[str]) -> list[tuple[str, str]]:
    """Spell names like known ones that differ in spaces around them or in their Unicode form."""
    if not known or all(name in known for name, _ in pairs):
        return pairs
    spelled = {normalize("NFC", name): name for name in known}
    return [
        (name if name in known else spelled.get(normalize("NFC", name.strip()), name), label) for name, label in pairs
    ]


SEPARATOR = "|"
"""Separates the labels of an image that has several."""


def read_label_sets(images: ImageSet, path: str | Path, others: Collection[str] = ()) -> tuple[torch.Tensor, list[str]]:
    """Read the labels of images that may have several each.

    Args:
        images: the images.
        path: a CSV file with rows `name,label`: several labels are separated by "|" or given in several rows, and an
            image without any row has none of the classes.
        others: names of further images that it may have rows of, such as those of another split.

    Returns:
        0 and 1 for each image and class, float32 [N,C], and the names of the classes.
    """
    names = set(images.names)
    given: dict[str, set[str]] = {}
    for name, labels in _rows(Path(path), names | set(others)):
        given.setdefault(name, set()).update(label.strip() for label in labels.split(SEPARATOR) if label.strip())
    if not names & set(given):
        raise DataError(f"{path} has no label for any of the images: its names are looked for in {images.name}")
    classes = _sorted_classes((label for labels in given.values() for label in labels), path)
    number = {name: i for i, name in enumerate(classes)}
    hot = torch.zeros(len(images), len(classes))
    for row, name in enumerate(images.names):
        hot[row, [number[label] for label in given.get(name, ())]] = 1
    return hot, classes


def has_label_sets(path: str | Path) -> bool:
    """Whether a CSV file gives some image several labels."""
    rows = _rows(Path(path))
    return len({name for name, _ in rows}) < len(rows) or any(SEPARATOR in label for _, label in rows)
