"""Embeddings files, read and written: .npy with names beside it, or .parquet with columns id, path, vector (and label).

N rows, F width.  Every row must be a vector of numbers that are finite as float32; one that is not is named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kontrast.data.file_columns import Texts
from kontrast.errors import DataError, EnvironmentFault, UsageError, printable, refuse_pickle, shorten
from kontrast.files import atomic_path, read_faults
from kontrast.lens.measures import directions

SUFFIXES = (".npy", ".parquet")
CHUNK = 65_536


@dataclass(frozen=True)
class Embeddings:
    """The content of an embeddings file; `file[start:stop]` are some rows as unit vectors, for cosines.

    vectors: [N,F], memory-mapped read-only for .npy files. names: one per row, "row N" if the file has none.
    """

    path: Path
    vectors: np.ndarray
    names: Sequence[str]
    labels: Tensor | None = None
    encoder: str | None = None  # SHA-256 of the encoder's file, if known

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, positions: Any) -> Tensor:
        return directions(self.rows(positions))

    def rows(self, positions: Any = slice(None)) -> Tensor:
        """Copy rows to a float32 tensor."""
        return torch.from_numpy(np.array(self.vectors[positions], dtype=np.float32))

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Return at most `count` rows, evenly spread over the file, and their positions."""
        count = min(count, len(self))
        positions = torch.arange(count) * len(self) // count
        return self.rows(positions.numpy()), positions


def check_suffix(path: Path, kind: str = "an embeddings file") -> None:
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path} is not {kind} ({' or '.join(SUFFIXES)})")


def names_path(path: Path) -> Path:
    """Return the path of the names of a .npy file: vectors.names.jsonl for vectors.npy."""
    return path.with_suffix(".names.jsonl")


def import_parquet() -> Any:
    """Import pyarrow's parquet module, or raise an error that says how to install it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise EnvironmentFault("parquet files need pyarrow: pip install pyarrow, or use .npy") from None
    return pyarrow.parquet


# Reading


class RowNames(Sequence[str]):
    """The names of the rows of a file that has none: "row 0", "row 1", ..."""

    def __init__(self, count: int):
        self.total = count

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: Any) -> Any:
        rows = range(self.total)[index]
        return f"row {rows}" if isinstance(rows, int) else [f"row {row}" for row in rows]


def read_embeddings(path: str | os.PathLike[str], width: int | None = None, *, checked: bool = False) -> Embeddings:
    """Read a file and check its shape, its width if one is given, and that every row is finite, unless it was `checked`
    before."""
    path = Path(path)
    refuse_pickle(path)
    check_suffix(path, "a run folder or an embeddings file")
    if not path.is_file():
        raise DataError(f"no embeddings file {path}: make one with `kontrast embed RUN DATA --out {path.name}`")
    with read_faults(path):
        vectors, names, labels, encoder = _read_npy(path) if path.suffix == ".npy" else _read_parquet(path)
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiu" or not all(vectors.shape):
        raise DataError(f"{path} holds {vectors.dtype} {list(vectors.shape)}: give numbers [rows, width], not empty")
    rows, columns = vectors.shape
    names = RowNames(rows) if names is None else names
    if len(names) != rows:
        raise DataError(f"{path} has {rows} rows, {names_path(path)} has {len(names)} rows: they don't belong together")
    if columns != (width or columns):
        raise DataError(f"{path} has vectors of width {columns}, the run gives {width}: another run wrote it")
    if not isinstance(encoder, str | None):
        raise DataError(f"{path} has {shorten(encoder)} as the digest of its encoder, not text: embed the images again")
    file = Embeddings(path, vectors, names, labels, encoder)
    if not checked:
        _check_finite(file)
    return file


Content = tuple[np.ndarray, Sequence[str] | None, Tensor | None, str | None]  # vectors, names, labels, encoder


def _read_npy(path: Path) -> Content:
    count, encoder = 0, None

    def names() -> Iterator[str]:
        nonlocal count, encoder
        with names_path(path).open(encoding="utf-8", errors="replace") as lines:
            for record in map(json.loads, lines):
                yield str(record["path"])
                count, encoder = count + 1, record.get("encoder", encoder)

    try:
        vectors = np.lib.format.open_memmap(path, mode="r")  # refuses arrays of objects, so nothing is unpickled
        if not names_path(path).is_file():
            return vectors, None, None, None
        known = Texts.of(names())
    except Exception as error:  # numpy parses the header as Python and lets nearly every built-in exception through
        raise_if_unread(error)
        names_line = f"line {count + 1} of {names_path(path).name} is not an object with a path"
        raise DataError(f"{path} is damaged or cut short, or {names_line}: {str(error)[:100]}") from None
    return vectors, known, None, encoder


def _read_parquet(path: Path) -> Content:
    module = import_parquet()
    from pyarrow import compute

    try:
        table = module.read_table(path)
        lengths = compute.list_value_length(table["vector"]).fill_null(-1).to_numpy()
        flat = _to_float32(compute.list_flatten(table["vector"]).to_numpy())
        names, raw, labels = (
            table[name].to_pylist() if name in table.column_names else None for name in ("path", "path_bytes", "label")
        )
        names = names if raw is None else [os.fsdecode(name) for name in raw]  # written if some name is not UTF-8
        encoder = json.loads((table.schema.metadata or {}).get(b"kontrast", b"{}")).get("encoder")
        wrong = np.flatnonzero(lengths != lengths[0])
    except Exception as error:  # damage can show up anywhere: in the footer, in a page, in a string that is not UTF-8
        raise_if_unread(error)
        what = "a parquet file whose column `vector` has lists of numbers"
        raise DataError(f"{path} is damaged or cut short, or is not {what}: {str(error)[:100]}") from None
    if len(wrong):
        raise DataError(f"{path}, row {wrong[0]}: not a vector of width {lengths[0]} like the first row")
    if labels is not None:
        known = None not in labels
        labels = torch.from_numpy(np.unique(list(map(str, labels)), return_inverse=True)[1]) if known else None
    names = None if names is None else list(map(str, names))
    return flat.reshape(len(lengths), -1), names, labels, encoder


def raise_if_unread(error: Exception) -> None:
    """Raise an error of the system again. Those of pyarrow about damage are OSErrors too, but have no number."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error


def _to_float32(values: Any) -> np.ndarray:
    """Convert without numpy's overflow warning: 1e300 becomes infinity, and `_check_finite` names its row."""
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float32)


def _check_finite(file: Embeddings) -> None:
    for start in range(0, len(file), CHUNK):
        finite = np.isfinite(_to_float32(file.vectors[start : start + CHUNK])).all(1)
        if not finite.all():
            row = start + int(finite.argmin())
            raise DataError(
                f"{file.path}, row {row} ({printable(file.names[row])}): NaN or infinity as float32; remove the row, "
                "or embed again with a run whose numbers are finite"
            )


# Writing


class Part(NamedTuple):
    """Consecutive rows of the output: a .npy file of vectors, the id and name of each, and the images skipped."""

    vectors: Path
    ids: list[int]
    names: list[str]
    bad: list[tuple[str, str]]


def write_embeddings(out: Path, parts: Sequence[Part], facts: dict[str, Any]) -> None:
    """Join the parts, in order, into `out`. Its bytes depend only on the parts and the facts."""
    if out.suffix == ".npy":
        _write_npy(out, parts, facts)
    else:
        _write_parquet(out, parts, facts)


def _write_npy(out: Path, parts: Sequence[Part], facts: dict[str, Any]) -> None:
    # Names first: if the vectors exist under their final name, so do the names.
    with atomic_path(names_path(out)) as place, place.open("w", encoding="ascii") as file:
        encoder = {"encoder": facts["encoder"]}  # only on the first line
        for part in parts:
            for number, name in zip(part.ids, part.names):
                file.write(json.dumps({"id": number, "path": name} | encoder) + "\n")
                encoder = {}
    header = {"descr": "<f4", "fortran_order": False, "shape": (sum(len(p.ids) for p in parts), facts["width"])}
    with atomic_path(out) as place, place.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(np.load(part.vectors, allow_pickle=False).astype("<f4", copy=False).tobytes())


def _write_parquet(out: Path, parts: Sequence[Part], facts: dict[str, Any]) -> None:
    module = import_parquet()
    import pyarrow

    vector = pyarrow.list_(pyarrow.float32(), facts["width"])
    fields = [("id", pyarrow.int64()), ("path", pyarrow.string()), ("vector", vector)]
    # Parquet strings are UTF-8. A name with other bytes (surrogates) is escaped as \udcXX in `path`, and `path_bytes`
    # holds the exact bytes of all names.
    raw_names = any(_as_utf8(name) != name for part in parts for name in part.names)
    fields += [("path_bytes", pyarrow.binary())] if raw_names else []
    about = {"kontrast": json.dumps({key: facts[key] for key in ("version", "encoder", "recipe", "data")})}
    schema = pyarrow.schema(fields, metadata=about)
    with atomic_path(out) as place, module.ParquetWriter(place, schema) as writer:
        for part in parts:
            flat = pyarrow.array(np.load(part.vectors, allow_pickle=False).ravel())
            columns = [
                pyarrow.array(part.ids, pyarrow.int64()),
                pyarrow.array(map(_as_utf8, part.names), pyarrow.string()),
                pyarrow.FixedSizeListArray.from_arrays(flat, facts["width"]),
            ]
            if raw_names:
                columns.append(pyarrow.array([os.fsencode(name) for name in part.names], pyarrow.binary()))
            writer.write_table(pyarrow.table(columns, schema=schema))


def _as_utf8(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()
