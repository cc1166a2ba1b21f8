"""Read and write Pascal VOC: one XML file of boxes per image, and lists of the images of each split.

    VOCdevkit/VOC2007/{Annotations/*.xml, JPEGImages/*.jpg, ImageSets/Main/{trainval,test}.txt}, and VOC2012 beside it

VOC counts pixels from 1 and includes the last one: its 1, 1, 4, 2 is the box from (0, 0) to (4, 2) here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch

from kontrast.data.annotated.annotated_images import AnnotatedImages
from kontrast.data.annotated.coco_files import CUT
from kontrast.data.annotated.objects import Objects, no_objects
from kontrast.data.annotated.picture_files import FolderPictures, unusable, write_pictures
from kontrast.data.decode import SUFFIXES
from kontrast.data.listing import held_out
from kontrast.errors import DataError
from kontrast.files import read_bytes, write_atomic

LARGEST = 10_000_000
LISTS = {"train": "trainval", "test": "test"}
"""The lists of images that are written for each split."""
SHARE = 0.2
"""The share of images that are held out for tests if there are no lists."""
Row = tuple[tuple[float, float, float, float], str, bool]  # box, class, difficult


def voc_folders(root: Path) -> list[Path]:
    """Return the folders with Annotations and JPEGImages: the root, or some of its sub-folders."""
    places = [root, *sorted(root.glob("*")), *sorted(root.glob("VOCdevkit/*"))]
    return [place for place in places if (place / "Annotations").is_dir() and (place / "JPEGImages").is_dir()]


def read_voc(root: Path, split: str = "train", source: str = "") -> AnnotatedImages:
    """Read a split of VOC folders; several years are joined.

    Tests are on the list `test` of the years that have one, and training is on `trainval` of all years. Without any
    such list, training is on `train` and tests are on `val`.

    Args:
        root: VOCdevkit, or the folder of one year.
        split: "train" (trainval) or "test".
        source: the source as the user wrote it.
    """
    names: list[str] = []
    sizes: list[tuple[int, int]] = []
    found: list[list[Row]] = []
    bad: list[tuple[str, str]] = []
    notes: Counter[str] = Counter()
    places = voc_folders(root)
    tested = any(_list_file(place, "test").is_file() for place in places)
    for place in places:
        pictures = {
            path.stem: path.name for path in (place / "JPEGImages").iterdir() if path.suffix.lower() in SUFFIXES
        }
        for stem in _stems(place, tested)[split]:
            file = f"{place.relative_to(root) / 'Annotations' / stem}.xml"
            read = _read_file(place / "Annotations" / f"{stem}.xml", file, bad, notes)
            name = str(place.relative_to(root) / "JPEGImages" / pictures.get(stem, f"{stem}.jpg"))
            problem = "" if read is None else unusable(root, name, read[0])
            if problem:
                bad.append((name, problem))
            elif read is not None:
                names.append(name)
                sizes.append(read[0])
                found.append(read[1])
    if not names:
        first = f", the first {bad[0][0]} ({bad[0][1]})" if bad else ""
        raise DataError(f"{root} has no usable image of split {split!r}{first}")
    classes = _classes(root)
    number = {name: i for i, name in enumerate(classes)}

    def objects(index: int, masks: bool) -> Objects:
        rows = found[index]
        if not rows:
            return no_objects()
        labels = torch.tensor([number[name] for _, name, _ in rows])
        return Objects(torch.tensor([box for box, _, _ in rows]), labels, torch.tensor([hard for _, _, hard in rows]))

    pixels = FolderPictures(root, names, sizes)
    return AnnotatedImages(names, classes, pixels, objects, split, source or str(root), bad=bad, notes=dict(notes))


def _classes(root: Path) -> tuple[str, ...]:
    """Return the names of all objects of all splits, so that train and test number them alike."""
    names: set[str] = set()
    for place in voc_folders(root):
        for path in sorted((place / "Annotations").glob("*.xml")):
            read = _read_file(path, path.name, [], Counter())
            names |= set() if read is None else {name for _, name, _ in read[1]}
    return tuple(sorted(names))


def _list_file(place: Path, name: str) -> Path:
    return place / "ImageSets" / "Main" / f"{name}.txt"


def _stems(place: Path, tested: bool) -> dict[str, list[str]]:
    """Return the names of the images of each split, without their endings.

    Args:
        place: the folder of a year.
        tested: whether any year has a test list. The others, such as VOC2012, then have no test images.
    """
    if not (place / "ImageSets" / "Main").is_dir():
        stems = sorted(path.stem for path in (place / "Annotations").glob("*.xml"))
        mask = held_out(stems, np.zeros(len(stems), dtype=np.int64), SHARE)
        return {part: [s for s, held in zip(stems, mask) if held == (part == "test")] for part in LISTS}
    train, test = "trainval" if _list_file(place, "trainval").is_file() else "train", "test"
    if not tested and all(_list_file(place, name).is_file() for name in ("train", "val")):
        train, test = "train", "val"  # trainval would contain the test images
    found = {"train": _read_list(_list_file(place, train)), "test": _read_list(_list_file(place, test))}
    if both := sorted(set(found["train"]) & set(found["test"])):
        raise DataError(f"{place}: {train}.txt and {test}.txt have {len(both)} images in common, the first {both[0]}")
    return found


def _read_list(file: Path) -> list[str]:
    """Return the names of a list; none if there is no such file."""
    if not file.is_file():
        return []
    lines = read_bytes(file).decode("utf-8", "replace").split("\n")
    return [Path(line.split()[0]).name for line in lines if line.strip()]


def _read_file(
    path: Path, name: str, bad: list[tuple[str, str]], notes: Counter[str]
) -> tuple[tuple[int, int], list[Row]] | None:
    """Return the size and the objects of an image, or None if its file can't be used, which is then in `bad`."""
    try:
        content = read_bytes(path)
        # An entity may expand to gigabytes; VOC's files have no document types.
        if len(content) > LARGEST or b"<!DOCTYPE" in content or b"<!ENTITY" in content or b"\0" in content:
            raise ValueError("an XML file that is too large, has a document type or is not UTF-8")
        root = ElementTree.fromstring(content)
        width, height = (int(float(root.findtext(f"size/{key}") or 0)) for key in ("width", "height"))
        if not (0 < width < 65_536 and 0 < height < 65_536):
            raise ValueError("an image without width and height")
    except FileNotFoundError:
        bad.append((name, "no such file"))
        return None
    except (ValueError, OverflowError, ElementTree.ParseError) as error:
        bad.append((name, str(error)))
        return None
    rows: list[Row] = []
    for i, entry in enumerate(root.findall("object"), 1):
        made = _row(entry, height, width, notes)
        if isinstance(made, str):
            bad.append((f"{name}, object {i}", made))
        else:
            rows.append(made)
    return (height, width), rows


def _row(entry: ElementTree.Element, height: int, width: int, notes: Counter[str]) -> Row | str:
    """Read one object, or say why it can't be used."""
    label = (entry.findtext("name") or "").strip()
    if not label:
        return "an object without a name"
    texts = [entry.findtext(f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")]
    try:
        x1, y1, x2, y2 = (float(text or "") for text in texts)
    except ValueError:
        return f"a box that is not four numbers: {texts}"
    if not all(map(math.isfinite, (x1, y1, x2, y2))) or x2 < x1 or y2 < y1:
        return f"a box without area: {texts}"
    left, top, right, bottom = max(x1 - 1, 0.0), max(y1 - 1, 0.0), min(x2, float(width)), min(y2, float(height))
    if right <= left or bottom <= top:
        return f"a box outside of the image: {texts}"
    notes[CUT] += x2 > width + 1 or y2 > height + 1 or x1 < 0 or y1 < 0
    return (left, top, right, bottom), label, (entry.findtext("difficult") or "").strip() == "1"


def write_voc(images: AnnotatedImages, folder: str | Path, others: Sequence[AnnotatedImages] = ()) -> Path:
    """Write images as PNG files with their boxes as VOC XML; several splits go into one folder, which is returned.

    Boxes are written in VOC's whole pixels, which the readers turn back into the same boxes if they have whole sides.

    Example:
        >>> import tempfile
        >>> from kontrast.data.annotated import canvas_objects
        >>> folder = write_voc(canvas_objects("test").subset(range(2)), tempfile.mkdtemp())
        >>> sorted(path.name for path in folder.iterdir())
        ['Annotations', 'ImageSets', 'JPEGImages']
    """
    root = Path(folder)
    for part in (images, *others):
        stems = []
        for i, name in enumerate(write_pictures(part, root / "JPEGImages")):
            stems.append(Path(name).stem)
            (root / "Annotations").mkdir(exist_ok=True)
            write_atomic(root / "Annotations" / f"{stems[-1]}.xml", _document(part, i, name))
        lists = root / "ImageSets" / "Main"
        lists.mkdir(parents=True, exist_ok=True)
        write_atomic(lists / f"{LISTS[part.split]}.txt", "".join(f"{stem}\n" for stem in stems))
    return root


def _document(images: AnnotatedImages, index: int, name: str) -> bytes:
    root = ElementTree.Element("annotation")
    ElementTree.SubElement(root, "filename").text = name
    size = ElementTree.SubElement(root, "size")
    pixels, found = images.read(index)
    for key, value in zip(("depth", "height", "width"), pixels.shape):
        ElementTree.SubElement(size, key).text = str(value)
    for box, label, hard in zip(found.boxes.tolist(), found.labels.tolist(), found.ignored.tolist()):
        entry = ElementTree.SubElement(root, "object")
        ElementTree.SubElement(entry, "name").text = images.classes[label]
        ElementTree.SubElement(entry, "difficult").text = str(int(hard))
        place = ElementTree.SubElement(entry, "bndbox")
        for key, value in zip(("xmin", "ymin", "xmax", "ymax"), (box[0] + 1, box[1] + 1, box[2], box[3])):
            ElementTree.SubElement(place, key).text = str(round(value))
    return ElementTree.tostring(root)
