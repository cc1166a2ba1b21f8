"""List the images in the columns of tables: Parquet files, and data sets of Hugging Face.

A column of images holds encoded files, as bytes or as {bytes, path}, which is how Hugging Face writes them. A column
named label (or class, ...) gives the labels, and one named caption (or text, ...) the captions.
"""

from __future__ import annotations

import fnmatch
import json
import os
import posixpath
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kontrast.addresses import is_address
from kontrast.data.captions import TEXT_COLUMNS, Pair, clean, with_captions
from kontrast.data.file_columns import Columns, Items, Shards, Texts
from kontrast.data.listing import TEST_NAMES, Listing
from kontrast.data.remote_files import Refused, State
from kontrast.data.remote_listing import list_objects
from kontrast.data.shards import expand_braces, number_labels
from kontrast.data.table_cells import arrow_table, cell_path, open_parquet, state_of_file
from kontrast.errors import DataError, EnvironmentFault, UsageError
from kontrast.registry import nearest

IMAGES = ("image", "img", "picture", "photo", "image_bytes", "bytes", "jpg", "jpeg", "png", "webp")
LABELS = ("label", "labels", "class", "category", "target", "y", "cls", "fine_label")
PREFIX = "hf-dataset:"


class Group(NamedTuple):
    """Rows that are read together, their labels (None: unknown) and their captions."""

    path: str
    name: str
    state: State
    rows: int
    labels: list[Any]
    captions: list[Any]
    names: list[str] | None


def names_tables(spec: str) -> bool:
    """Whether a source names Parquet files."""
    return spec.lower().endswith(".parquet")


def table_files(spec: str) -> list[str]:
    """The Parquet files that a file, a folder, `train-{00..09}.parquet` or `data/*.parquet` means, in order."""
    if "*" in spec:
        root = spec.partition("*")[0].rpartition("/")[0]
        return [path for path in table_files(root or ".") if fnmatch.fnmatchcase(path, spec)]
    if names_tables(spec):
        return expand_braces(spec)
    if is_address(spec):
        return [f"{spec}/{name}" for name in list_objects(spec).names if names_tables(name)]
    found = [os.path.join(folder, name) for folder, _, names in os.walk(spec) for name in names if names_tables(name)]
    return sorted(found, key=os.fsencode)


def split_of_file(path: str) -> str:
    """The split that a file belongs to by its name (`train-00000-of-00002.parquet`) or its folder; "" if none."""
    folder, base = posixpath.split(path)
    for word in (base.partition(".")[0].partition("-")[0], posixpath.basename(folder)):
        if word in ("train", *TEST_NAMES):
            return word
    return ""


def scan_tables(spec: str, files: Sequence[str], captions: bool = False) -> Listing:
    """List the images in Parquet files, with their labels, and with their captions if they are wanted."""
    if not files:
        raise DataError(f"no Parquet files in {spec}")
    top = os.path.dirname(files[0]) if len(files) == 1 else posixpath.commonpath([os.path.dirname(f) for f in files])
    top = top.replace(":/", "://", 1) if is_address(files[0]) and "://" not in top else top
    groups: list[Group] = []
    for file in files:
        try:
            state = state_of_file(file)
        except Refused as error:
            raise DataError(f"can't read {file}: {error.reason}") from None
        with open_parquet(file, state) as opened:
            groups += _groups_of(file, file[len(top) :].lstrip("/"), state, opened, captions)
    return _listing(spec, groups, captions)


def _groups_of(file: str, name: str, state: State, opened: Any, captions: bool) -> list[Group]:
    image, label, text = choose_columns(opened.schema_arrow, file)
    wanted = [column for column in (label, text if captions else None) if column]
    groups = []
    for number in range(opened.num_row_groups):
        rows = opened.metadata.row_group(number).num_rows
        table = opened.read_row_group(number, columns=wanted) if wanted else None
        path = cell_path("parquet", file, image, number)
        groups.append(_group(path, name, state, rows, table, label, text if captions else None, opened.schema_arrow))
    return groups


def _group(path: str, name: str, state: State, rows: int, table: Any, label: str | None, text: str | None,
           schema: Any) -> Group:  # fmt: skip
    labels = table.column(label).to_pylist() if label else [None] * rows
    texts = table.column(text).to_pylist() if text else []
    return Group(path, name, state, rows, labels, texts, class_names(schema, label))


def choose_columns(schema: Any, file: str) -> tuple[str, str | None, str | None]:
    """The columns of images (of structs: its field `bytes`), labels and captions."""
    import pyarrow.types as types

    images: dict[str, str] = {}
    for field in schema:
        if types.is_binary(field.type) or types.is_large_binary(field.type):
            images[field.name] = field.name
        elif types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
            images[field.name] = f"{field.name}.bytes"
    known = {name.lower(): name for name in reversed(schema.names)}
    image = next((known[word] for word in IMAGES if known.get(word) in images), None)
    if image is None and len(images) != 1:
        columns = ", ".join(schema.names[:12])
        raise DataError(f"{file} has the columns {columns}: it needs one of encoded images, named 'image'")
    plain: Callable[[str], bool] = lambda name: (  # noqa: E731
        types.is_integer(schema.field(name).type) or types.is_string(schema.field(name).type)
        or types.is_large_string(schema.field(name).type) or types.is_dictionary(schema.field(name).type)
    )  # fmt: skip
    label = next((known[word] for word in LABELS if word in known and plain(known[word])), None)
    text = next((known[word] for word in TEXT_COLUMNS if word in known), None)
    return images[image or next(iter(images))], label, text


def class_names(schema: Any, label: str | None) -> list[str] | None:
    """The names of the classes, if Hugging Face's datasets wrote them."""
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _listing(spec: str, groups: list[Group], captions: bool) -> Listing:
    groups = [group for group in groups if group.rows]
    if not groups:
        raise DataError(f"no rows in {spec}")
    counts = np.array([group.rows for group in groups])
    first = {name: 0 for name in dict.fromkeys(group.name for group in groups)}
    bases: list[str] = []
    pairs: list[Pair] = []
    for group in groups:
        names = [f"{first[group.name] + row:08d}" for row in range(group.rows)]
        first[group.name] += group.rows
        bases += names
        for name, texts in zip(names, group.captions):
            some = texts if isinstance(texts, list) and texts else [texts]
            pairs += [(f"{group.name}/{name}", *clean(text)) for text in some]
    states = np.array([group.state for group in groups], np.int64)
    columns = Columns(
        base=Texts.of(bases),
        folder=np.repeat(np.arange(len(groups), dtype=np.int32), counts),
        first=np.concatenate([np.arange(count, dtype=np.int64) for count in counts.tolist()]),
        second=np.full(len(bases), -1, np.int64),
        prefixes=[f"{group.name}/" for group in groups],
        shards=Shards([group.path for group in groups], states[:, 0], states[:, 1]),
    )
    listing = Listing(spec, Items(columns), *_labels(groups))
    return with_captions(listing, pairs) if captions and pairs else listing


def _labels(groups: list[Group]) -> tuple[np.ndarray | None, list[str] | None]:
    given = [label for group in groups for label in group.labels]
    names = groups[0].names
    known = [label for label in given if isinstance(label, int) and not isinstance(label, bool) and label >= 0]
    if names and len(known) == len(given) and max(known) < len(names) and len(set(known)) > 1:
        return np.array(known, np.int64), names
    is_label = lambda one: isinstance(one, str) or (isinstance(one, int) and one >= 0)  # noqa: E731
    return number_labels([str(one) if is_label(one) else None for one in given])


def scan_dataset(spec: str, split: str, captions: bool = False) -> tuple[Listing, bool]:
    """List the images of a Hugging Face data set: `hf-dataset:owner/name[:split]`, or a folder that `save_to_disk`
    wrote in place of the name.

    Returns:
        the listing, and whether it is one of the data set's own splits, so that nothing has to be divided.
    """
    name, chosen = _name_and_split(spec)
    parts = _load(name)
    if chosen:
        if chosen not in parts:
            raise DataError(f"{name} has no split {chosen!r}: {nearest(chosen, parts)}")
        return _scan_arrow(spec, parts[chosen], captions), False
    if "train" not in parts or len(parts) == 1:
        return _scan_arrow(spec, next(iter(parts.values())), captions), False
    tests = [one for one in ("test", "validation", "valid", "val") if one in parts]
    if split in ("train", "all") or not tests:
        return _scan_arrow(spec, parts["train"], captions), bool(tests)
    return _scan_arrow(spec, parts[split if split in parts else tests[0]], captions), True


def absolute_dataset(spec: str) -> str:
    """The data set, with the absolute path if it is in a folder."""
    name, split = _name_and_split(spec)
    place = os.path.abspath(name) if os.path.isdir(name) else name
    return f"{PREFIX}{place}{f':{split}' if split else ''}"


def _name_and_split(spec: str) -> tuple[str, str]:
    whole = spec.removeprefix(PREFIX)
    name, mark, split = whole.rpartition(":")
    return (name, split) if mark and "/" not in split and not os.path.isdir(whole) else (whole, "")


def _load(name: str) -> dict[str, Any]:
    """The splits of a data set. Only data are loaded, never code that comes with a data set."""
    try:
        import datasets
    except ImportError:
        raise EnvironmentFault(f"{PREFIX}{name} needs datasets: pip install 'kontrast[datasets]'") from None
    if not name:
        raise UsageError(f"{PREFIX} needs a name: {PREFIX}owner/name, or a folder that save_to_disk wrote")
    more = {"trust_remote_code": False} if int(datasets.__version__.split(".")[0]) < 4 else {}
    try:
        found = datasets.load_from_disk(name) if os.path.isdir(name) else datasets.load_dataset(name, **more)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        kind = EnvironmentFault if isinstance(error, ConnectionError) else DataError
        raise kind(f"can't load the data set {name}: {' '.join(str(error).split())[:300]}") from None
    return dict(found) if isinstance(found, dict) else {str(found.split or "all"): found}


def _scan_arrow(spec: str, dataset: Any, captions: bool) -> Listing:
    files = [str(one["filename"]) for one in dataset.cache_files]
    if not files or dataset._indices is not None:
        raise DataError(f"{spec} is not in Arrow files: save it with save_to_disk(FOLDER) and give {PREFIX}FOLDER")
    groups = []
    for file in files:
        table = arrow_table(file)
        image, label, text = choose_columns(table.schema, file)
        path, state = cell_path("arrow", file, image, 0), state_of_file(file)
        groups.append(_group(path, os.path.basename(file), state, len(table), table, label, text if captions else None,
                             table.schema))  # fmt: skip
    return _listing(spec, groups, captions)
