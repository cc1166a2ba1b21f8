"""The captions of images, and the files that bring them: CSV, TSV, JSON lines, JSON, Parquet, Flickr8k's token file.

N images, M captions, T distinct texts. This module does not import torch: the processes that decode images use it too.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kontrast.addresses import is_address
from kontrast.data.listing import Listing
from kontrast.errors import DataError, EnvironmentFault
from kontrast.files import read_bytes, read_faults

NAMES = (
    "captions.csv", "captions.tsv", "captions.jsonl", "captions.json", "captions.parquet", "captions.txt",
    "metadata.csv", "metadata.jsonl", "metadata.parquet",
)  # fmt: skip
"""The files that are looked for beside the images."""
FILE_COLUMNS = ("file", "image", "file_name", "filename", "name", "path", "filepath", "image_name")
TEXT_COLUMNS = ("caption", "captions", "text", "sentence", "sentences", "comment", "title")
LONGEST = 10_000
"""Characters of a caption; a longer one is taken for damage."""
Pair = tuple[str, str | None, str]
"""The name of an image, its caption (None if it is bad), and why it is bad."""


class NoCaptions(DataError):
    """The images have no captions."""


@dataclass(frozen=True)
class Captions:
    """The captions of N images. Captions with the same text have the same id.

    Attributes:
        texts: the T distinct texts, in the order in which they first appear.
        ids: int64 [M], the number of each caption's text, image by image.
        starts: int64 [N+1]: image i has the captions starts[i] to starts[i+1] - 1, at least one.

    Example:
        >>> captions = Captions.of([["a cat", "a pet"], ["a pet"]])
        >>> captions.texts, captions.ids.tolist(), captions.of_image(0)
        (['a cat', 'a pet'], [0, 1, 1], ['a cat', 'a pet'])
    """

    texts: list[str]
    ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, per_image: Iterable[Sequence[str]]) -> Captions:
        """Number the captions of each image."""
        numbers: dict[str, int] = {}
        ids, starts = [], [0]
        for captions in per_image:
            ids += [numbers.setdefault(text, len(numbers)) for text in captions]
            starts.append(len(ids))
        return cls(list(numbers), np.array(ids, dtype=np.int64), np.array(starts, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of_image(self, position: int) -> list[str]:
        """Return the captions of one image."""
        return [self.texts[i] for i in self.ids[self.starts[position] : self.starts[position + 1]]]

    def per_image(self) -> list[list[str]]:
        """Return the captions of all images."""
        return [self.of_image(position) for position in range(len(self))]

    def take(self, positions: Iterable[int]) -> Captions:
        """Return the captions of the images at these positions."""
        return Captions.of(self.of_image(int(position)) for position in positions)

    @property
    def owners(self) -> np.ndarray:
        """int64 [M], the image that each caption belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    @property
    def repeated(self) -> bool:
        """Whether two images have a caption in common."""
        pairs = np.unique(np.stack([self.owners, self.ids]), axis=1)
        return pairs.shape[1] > len(self.texts)

    @property
    def digest(self) -> str:
        """SHA-256 of all captions and of the images that they belong to."""
        content = hashlib.sha256("\0".join(self.texts).encode("utf-8", "surrogatepass"))
        content.update(self.ids.astype("<i8").tobytes() + self.starts.astype("<i8").tobytes())
        return content.hexdigest()


def clean(text: object) -> tuple[str | None, str]:
    """Return a caption with single spaces, or None and the reason why it is no caption."""
    if not isinstance(text, str):
        return None, "its caption is missing" if text is None else f"its caption is no text but {type(text).__name__}"
    words = " ".join(text.split())
    if not words:
        return None, "its caption is empty"
    if len(words) > LONGEST:
        return None, f"its caption has more than {LONGEST:,} characters"
    if "�" in words or words.encode("utf-8", "replace").decode() != words:
        return None, "its caption is not UTF-8 text"
    return words, ""


def with_captions(
    found: Listing,
    pairs: Iterable[Pair],
    prefix: str = "",
    whole: bool = True,
    others: Callable[[], Iterable[str]] = tuple,
) -> Listing:
    """Return the images of a listing that have captions. Those without, and bad captions, are listed as bad.

    Args:
        found: the images.
        pairs: names and captions. A name is relative to the source or to the folder of the listing, or it is the name
            of the file alone if that is unique.
        prefix: the folder of the listing inside the source, such as "train/".
        whole: whether the listing has all images of the source, so that a caption without an image is bad too.
        others: returns the names of the images of the other splits, relative to their folders; called if a name does
            not say which split it is in.
    """
    places = {item.name: i for i, item in enumerate(found.items)}
    alone: dict[str, int | None] = {}
    for name, number in places.items():
        last = name.rsplit("/", 1)[-1]
        alone[last] = None if last in alone else number
    elsewhere = functools.cache(lambda: {short for name in others() for short in (name, name.rsplit("/", 1)[-1])})
    captions: list[list[str]] = [[] for _ in found.items]
    bad: dict[str, str] = {}
    for name, text, reason in pairs:
        place = places.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if place is None:
            place = places.get(name, alone.get(name))
            if place is not None and name in elsewhere():
                own = f"{prefix}{found.items[place].name}"
                text, reason = None, f"an image of another split has the same name: write {own}"
        if text is None:
            bad.setdefault(name, reason)
        elif place is not None:
            captions[place].append(text)
        elif whole:
            bad.setdefault(name, "it has a caption, and is not among the images")
    kept = [i for i, texts in enumerate(captions) if texts]
    unreadable = {name for name, _ in found.bad}  # images that can't be read may have captions
    for name, texts in zip(places, captions):
        if not texts:
            bad.setdefault(name, "it has no caption")
    if not kept:
        raise NoCaptions(f"none of the {len(found.items)} images in {found.root} has a caption")
    listed = [*found.bad, *((name, reason) for name, reason in bad.items() if name not in unreadable)]
    return replace(found.take(np.array(kept)), captions=Captions.of(captions[i] for i in kept), bad=listed)


def find_captions(folder: str, chosen: str) -> Path:
    """Return the file of captions of a folder of images; of one at an address, a copy of the file.

    Args:
        folder: the source.
        chosen: the file, absolute or inside the folder; "auto" for the first of `NAMES` in the folder.
    """
    if is_address(folder) and not os.path.isabs(chosen):
        from kontrast.data.remote_copies import copy_file
        from kontrast.data.remote_listing import list_objects

        name = _choose(folder, chosen, set(list_objects(folder).names).__contains__)
        return copy_file(f"{folder}/{name}")
    return Path(folder, _choose(folder, chosen, lambda name: os.path.isfile(os.path.join(folder, name))))


def _choose(folder: str, chosen: str, exists: Callable[[str], bool]) -> str:
    """The file of captions, if it exists: the chosen one or, with "auto", the first of `NAMES`."""
    if chosen != "auto":
        if not exists(chosen):
            path = os.path.join(folder, chosen)
            raise NoCaptions(f"data.captions: there is no file {path}: give a path inside {folder}, or an absolute one")
        return chosen
    name = next(filter(exists, NAMES), None)
    if name is None:
        raise NoCaptions(
            f"{folder} has no captions: put captions.csv with the columns file,caption beside the images, or name the "
            "file with data.captions=FILE"
        )
    return name


def read_captions(path: Path) -> Iterator[Pair]:
    """Iterate over the names and captions of a file. A bad line gives a pair without a caption."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _of_rows(parquet_rows(path), path)
    with read_faults(path):
        text = read_bytes(path).decode("utf-8-sig", "replace")
    if suffix == ".jsonl":
        return _of_rows((_json(line) for line in text.split("\n") if line.strip()), path)
    if suffix == ".json":
        tree = _json(text)
        rows = tree.get("images", tree) if isinstance(tree, dict) else tree
        if isinstance(tree, dict) and isinstance(rows, list) and isinstance(tree.get("annotations"), list):
            rows = _of_annotations(rows, tree["annotations"])
        if isinstance(rows, dict):  # {"a.jpg": "a caption" or ["a caption", ...]}
            rows = [{"file": name, "caption": captions} for name, captions in rows.items()]
        return _of_rows(rows if isinstance(rows, list) else [], path)
    if suffix == ".txt" and "#0\t" in text[:LONGEST]:
        return _of_tokens(text)
    return _of_rows(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if suffix == ".tsv" else ","), path)


def parquet_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a Parquet file. Columns of images, structs or bytes, are read only if they are named."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise EnvironmentFault(f"{path.name} needs pyarrow: pip install 'kontrast[parquet]'") from None
    try:
        with read_faults(path), pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            plain = [f.name for f in schema if not pyarrow.types.is_struct(f.type) and not _is_binary(f.type)]
            for batch in file.iter_batches(256, columns=list(columns) if columns else plain):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is damaged or no Parquet file: {' '.join(str(error).split())}") from None


def _is_binary(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _of_annotations(images: list[Any], annotations: list[Any]) -> list[Any]:
    """Return COCO's captions as rows: an annotation names its image by `image_id`."""
    names = {str(one.get("id")): one.get("file_name") for one in images if isinstance(one, dict)}
    return [
        {"file": names.get(str(one.get("image_id"))), "caption": one.get("caption")} if isinstance(one, dict) else None
        for one in annotations
    ]


def _of_rows(rows: Iterable[Any], path: Path) -> Iterator[Pair]:
    """Read rows with a column for the file and one for a caption or a list of captions."""
    keys: tuple[str, str] | None = None
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                yield f"{path.name}, row {number}", None, "the row can't be read"
                continue
            keys = keys or _columns(row, path)
            name, value = row.get(keys[0]), row.get(keys[1])
            if not isinstance(name, str) or not name.strip():
                yield f"{path.name}, row {number}", None, "the row names no file"
                continue
            name = os.path.normpath(name.strip()).replace(os.sep, "/")
            if None in row:  # csv's key of the cells that the header has no name for
                yield name, None, "it has more cells than the header: quote the caption"
                continue
            for one in value if isinstance(value, list) and value else [value]:
                one = one.get("raw", one.get("text")) if isinstance(one, dict) else one
                yield name, *clean(one)
    except csv.Error as error:
        yield f"{path.name}, row {number + 1}", None, f"the rest of the file can't be read: {error}"


def _columns(row: dict[Any, Any], path: Path) -> tuple[str, str]:
    """Return the columns of the file and of the caption."""
    names = {str(key).strip().lower(): key for key in row if key is not None}
    found = [next((names[n] for n in known if n in names), None) for known in (FILE_COLUMNS, TEXT_COLUMNS)]
    if None in found:
        given = ", ".join(map(str, list(row)[:8]))
        raise DataError(f"{path} has the columns {given}: it needs one of file names ('file') and one named 'caption'")
    return found[0], found[1]  # type: ignore[return-value]


def _of_tokens(text: str) -> Iterator[Pair]:
    """Read Flickr8k's own file: `1000268201_693b08cb0e.jpg#0<tab>A child in a pink dress ...`."""
    for number, line in enumerate(text.split("\n"), 1):
        name, _, caption = line.partition("\t")
        if line.strip():
            yield name.rpartition("#")[0] or f"line {number}", *clean(caption)
