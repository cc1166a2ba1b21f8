"""Embeddings files, read and written: .npy with names beside it, or .parquet with columns id, path, vector (and label).

N rows, F width.  Every row must be a vector of numbers that are finite as float32; one that is not is named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kontrast.errors import DataError, EnvironmentFault, UsageError, printable, refuse_pickle
from kontrast.files import atomic_path

SUFFIXES = (".npy", ".parquet")
CHUNK = 65_536


@dataclass(frozen=True)
class Embeddings:
    """The content of an embeddings file.

    vectors: [N,F], memory-mapped read-only for .npy files. names: one per row, "row N" if the file has none.
    """

    path: Path
    vectors: np.ndarray
    names: Sequence[str]
    labels: Tensor | None = None
    classes: list[str] | None = None
    encoder: str | None = None  # SHA-256 of the encoder's file, if known

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def width(self) -> int:
        return int(self.vectors.shape[1])

    def rows(self, positions: Any = slice(None)) -> Tensor:
        """Copy rows to a float32 tensor."""
        return torch.from_numpy(np.array(self.vectors[positions], dtype=np.float32))

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Return at most `count` rows, evenly spread over the file, and their positions."""
        count = min(count, len(self))
        positions = torch.arange(count) * len(self) // count
        return self.rows(positions.numpy()), positions


def check_suffix(path: Path) -> str:
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: an embeddings file ends in {' or '.join(SUFFIXES)}")
    return path.suffix


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


def read_embeddings(path: str | os.PathLike[str], width: int | None = None) -> Embeddings:
    """Read a file and check its shape, its width if one is given, and that every row is finite."""
    path = Path(path)
    refuse_pickle(path)
    if path.suffix not in SUFFIXES and not path.exists():
        raise UsageError(f"no run folder or embeddings file ({' or '.join(SUFFIXES)}) {path}")
    suffix = check_suffix(path)
    if not path.is_file():
        raise DataError(f"no embeddings file {path}: make one with `kontrast embed RUN DATA --out {path.name}`")
    file = _read_npy(path) if suffix == ".npy" else _read_parquet(path)
    if width is not None and file.width != width:
        raise DataError(f"{path} has vectors of width {file.width}, the run gives {width}: another run wrote it")
    _check_finite(file)
    return file


def _read_npy(path: Path) -> Embeddings:
    try:
        vectors = np.lib.format.open_memmap(path, mode="r")  # refuses arrays of objects, so nothing is unpickled
    except Exception as error:  # numpy parses the header as Python and lets nearly every built-in exception through
        raise DataError(f"{path} is damaged or cut short, or is not a .npy file: {str(error)[:100]}") from None
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiu" or not all(vectors.shape):
        raise DataError(f"{path} holds {vectors.dtype} {list(vectors.shape)}: give numbers [rows, width], not empty")
    names_file = names_path(path)
    names, encoder = _read_names(names_file) if names_file.is_file() else (_row_numbers(len(vectors)), None)
    if len(names) != len(vectors):
        raise DataError(f"{names_file} names {len(names)} rows, {path} has {len(vectors)}: they don't belong together")
    return Embeddings(path, vectors, names, encoder=encoder)


def _row_numbers(count: int) -> list[str]:
    return [f"row {i}" for i in range(count)]


def _read_names(path: Path) -> tuple[list[str], str | None]:
    names, encoder = [], None
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                names.append(str(record["path"]))
                encoder = record.get("encoder", encoder)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise DataError(f'{path}, line {number}: needs an object with "path"') from None
    return names, encoder


def _read_parquet(path: Path) -> Embeddings:
    module = import_parquet()
    try:
        return _convert_table(module.read_table(path), path)
    except DataError:
        raise
    except Exception as error:  # damage can show up anywhere: in the footer, in a page, in a string that is not UTF-8
        raise DataError(f"{path} is damaged or cut short, or is not a parquet file: {str(error)[:100]}") from None


def _convert_table(table: Any, path: Path) -> Embeddings:
    columns = table.column_names
    if "vector" not in columns or table.num_rows == 0:
        raise DataError(f"{path} has {table.num_rows} rows and columns {columns}: give rows with a `vector`")
    vectors = _stack_lists(table["vector"], path)
    if "path_bytes" in columns:  # written if some name is not UTF-8
        names = [os.fsdecode(n) if isinstance(n, bytes) else str(n) for n in table["path_bytes"].to_pylist()]
    elif "path" in columns:
        names = [str(n) for n in table["path"].to_pylist()]
    else:
        names = _row_numbers(table.num_rows)
    labels, classes = _encode_labels(table["label"].to_pylist()) if "label" in columns else (None, None)
    about = (table.schema.metadata or {}).get(b"kontrast", b"{}")
    return Embeddings(path, vectors, names, labels, classes, json.loads(about).get("encoder"))


def _stack_lists(column: Any, path: Path) -> np.ndarray:
    """Convert a column of lists to float32 [N,F]; the first row of another length is an error."""
    parts: list[np.ndarray] = []
    width = None
    for chunk in column.chunks:
        lengths = np.diff(chunk.offsets.to_numpy()) if hasattr(chunk, "offsets") else None
        if lengths is None and not hasattr(chunk.type, "list_size"):
            raise DataError(f"{path}: `vector` is {column.type}, give lists of numbers")
        width = width or (chunk.type.list_size if lengths is None else int(lengths[0]) if len(lengths) else None)
        if chunk.null_count or (lengths is not None and (lengths != width).any()):
            valid = chunk.is_valid().to_numpy(zero_copy_only=False)
            wrong = ~valid if lengths is None else ~valid | (lengths != width)
            row = sum(map(len, parts)) + int(wrong.argmax())
            raise DataError(f"{path}, row {row}: not a vector of width {width} like the first row")
        flat = chunk.flatten().to_numpy(zero_copy_only=False)
        parts.append(_to_float32(flat).reshape(-1, width or 1))
    if not width:
        raise DataError(f"{path}: its vectors are empty")
    return np.concatenate(parts)


def _encode_labels(values: list[Any]) -> tuple[Tensor | None, list[str] | None]:
    """Return labels as integers and the class names, or None if some row has no label."""
    if any(v is None for v in values):
        return None, None
    names = [str(v) for v in values]
    classes = sorted(set(names))
    number = {name: i for i, name in enumerate(classes)}
    return torch.tensor([number[name] for name in names]), classes


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


class VectorPart(Protocol):
    """Consecutive rows of the output: a .npy file of vectors, and the id and name of each."""

    @property
    def vectors(self) -> Path: ...
    @property
    def ids(self) -> list[int]: ...
    @property
    def names(self) -> list[str]: ...


def write_embeddings(out: Path, parts: Sequence[VectorPart], facts: dict[str, Any]) -> None:
    """Join the parts, in order, into `out`. Its bytes depend only on the parts and the facts."""
    if out.suffix == ".npy":
        _write_npy(out, parts, facts)
    else:
        _write_parquet(out, parts, facts)


def _write_npy(out: Path, parts: Sequence[VectorPart], facts: dict[str, Any]) -> None:
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


def _write_parquet(out: Path, parts: Sequence[VectorPart], facts: dict[str, Any]) -> None:
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
