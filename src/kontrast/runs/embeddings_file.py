"""Embeddings files read back: .npy with names beside it, or .parquet with the columns id, path, vector (and label).

N rows, F width.  A row that is no vector of finite numbers, as float32, is refused by its number and name.
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
ROWS = 65_536


@dataclass(frozen=True)
class Embeddings:
    """vectors: float32 [N,F], of a .npy file memory-mapped and for reading alone; names: one a row, or row numbers."""

    path: Path
    vectors: np.ndarray
    names: Sequence[str]
    labels: Tensor | None = None
    classes: list[str] | None = None
    encoder: str | None = None  # SHA-256 of the encoder's file, where the file tells it

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def width(self) -> int:
        return int(self.vectors.shape[1])

    def rows(self, positions: Any = slice(None)) -> Tensor:
        """Rows as a float32 tensor of its own."""
        return torch.from_numpy(np.array(self.vectors[positions], dtype=np.float32))

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """At most `count` rows, evenly over the file, and their positions."""
        kept = torch.arange(min(count, len(self))) * len(self) // min(count, len(self))
        return self.rows(kept.numpy()), kept


def check_suffix(path: Path) -> str:
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: an embeddings file ends in {' or '.join(SUFFIXES)}")
    return path.suffix


def names_path(path: Path) -> Path:
    """Where the names of a .npy file lie: vectors.npy has vectors.names.jsonl."""
    return path.with_suffix(".names.jsonl")


def read_embeddings(path: str | Path, width: int | None = None) -> Embeddings:
    """The file, checked: shape, width where one is asked for, and every row finite."""
    path = Path(path)
    refuse_pickle(path)
    if path.suffix not in SUFFIXES and not path.exists():
        raise UsageError(f"no run folder or embeddings file ({' or '.join(SUFFIXES)}) {path}")
    suffix = check_suffix(path)
    if not path.is_file():
        raise DataError(f"no embeddings file {path}: make one with `kontrast embed RUN DATA --out {path.name}`")
    found = _read_npy(path) if suffix == ".npy" else _read_parquet(path)
    if width is not None and found.width != width:
        raise DataError(f"{path} has vectors of width {found.width}, the run gives {width}: it is of another run")
    _finite(found)
    return found


def _read_npy(path: Path) -> Embeddings:
    try:
        vectors = np.lib.format.open_memmap(path, mode="r")  # of an array of objects it refuses: nothing is unpickled
    except Exception as error:  # its header is parsed as Python, by way of nearly every built-in exception
        raise DataError(f"{path} is damaged or cut short, or is no .npy file: {str(error)[:100]}") from None
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiu":
        raise DataError(f"{path} holds {vectors.dtype} {list(vectors.shape)}: give numbers [rows, width]")
    if not all(vectors.shape):
        raise DataError(f"{path} is empty: shape {list(vectors.shape)}")
    beside = names_path(path)
    names, encoder = _names(beside) if beside.is_file() else ([f"row {i}" for i in range(len(vectors))], None)
    if len(names) != len(vectors):
        raise DataError(f"{beside} names {len(names)} rows, {path} has {len(vectors)}: they are of different files")
    return Embeddings(path, vectors, names, encoder=encoder)


def _names(path: Path) -> tuple[list[str], str | None]:
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


def parquet() -> Any:
    """pyarrow's parquet module, or a line that says how to get it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise EnvironmentFault("parquet files need pyarrow: pip install pyarrow, or use .npy") from None
    return pyarrow.parquet


def _read_parquet(path: Path) -> Embeddings:
    module = parquet()
    try:
        return _of_table(module.read_table(path), path)
    except DataError:
        raise
    except Exception as error:  # damage shows anywhere: in the footer, a page, a string that is no UTF-8
        raise DataError(f"{path} is damaged or cut short, or is no parquet file: {str(error)[:100]}") from None


def _of_table(table: Any, path: Path) -> Embeddings:
    if "vector" not in table.column_names or table.num_rows == 0:
        raise DataError(f"{path} has {table.num_rows} rows and columns {table.column_names}: give rows with a `vector`")
    vectors = _stacked(table["vector"], path)
    names = _parquet_names(table)
    labels, classes = _coded(table["label"].to_pylist()) if "label" in table.column_names else (None, None)
    about = (table.schema.metadata or {}).get(b"kontrast", b"{}")
    return Embeddings(path, vectors, names, labels, classes, json.loads(about).get("encoder"))


def _parquet_names(table: Any) -> list[str]:
    """Of `path_bytes`, which is there where a name is no UTF-8; of `path`; or numbers."""
    if "path_bytes" in table.column_names:
        return [os.fsdecode(n) if isinstance(n, bytes) else str(n) for n in table["path_bytes"].to_pylist()]
    if "path" in table.column_names:
        return [str(n) for n in table["path"].to_pylist()]
    return [f"row {i}" for i in range(table.num_rows)]


def _stacked(column: Any, path: Path) -> np.ndarray:
    """A column of lists as float32 [N,F]; the first row of another length is named."""
    parts: list[np.ndarray] = []
    width = None
    for chunk in column.chunks:
        lengths = np.diff(chunk.offsets.to_numpy()) if hasattr(chunk, "offsets") else None
        if lengths is None and not hasattr(chunk.type, "list_size"):
            raise DataError(f"{path}: `vector` is {column.type}, give lists of numbers")
        width = width or (chunk.type.list_size if lengths is None else int(lengths[0]) if len(lengths) else None)
        if chunk.null_count or (lengths is not None and (lengths != width).any()):
            valid = chunk.is_valid().to_numpy(zero_copy_only=False)
            odd = ~valid if lengths is None else ~valid | (lengths != width)
            row = sum(map(len, parts)) + int(odd.argmax())
            raise DataError(f"{path}, row {row}: not a vector of width {width} as the first is")
        flat = chunk.flatten().to_numpy(zero_copy_only=False)
        parts.append(_single(flat).reshape(-1, width or 1))
    if not width:
        raise DataError(f"{path}: its vectors have no numbers")
    return np.concatenate(parts)


def _coded(values: list[Any]) -> tuple[Tensor | None, list[str] | None]:
    """Labels as numbers, with the classes' names; none where a row has none."""
    if any(v is None for v in values):
        return None, None
    words = [str(v) for v in values]
    classes = sorted(set(words))
    place = {name: i for i, name in enumerate(classes)}
    return torch.tensor([place[word] for word in words]), classes


def _single(values: Any) -> np.ndarray:
    """As float32; what it can't hold (1e300) becomes infinity without a warning, and `_finite` names its row."""
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float32)


def _finite(found: Embeddings) -> None:
    for start in range(0, len(found), ROWS):
        good = np.isfinite(_single(found.vectors[start : start + ROWS])).all(1)
        if not good.all():
            row = start + int(good.argmin())
            raise DataError(
                f"{found.path}, row {row} ({printable(found.names[row])}): NaN or infinity as float32; remove the row, "
                "or embed again with a run whose numbers are finite"
            )


class Rows(Protocol):
    """What is joined: a .npy file of vectors, and the id and name of each."""

    @property
    def vectors(self) -> Path: ...
    @property
    def ids(self) -> list[int]: ...
    @property
    def names(self) -> list[str]: ...


def join(out: Path, parts: Sequence[Rows], facts: dict[str, Any]) -> None:
    """Write `out` from its parts, in their order; the bytes depend on parts and facts alone."""
    if out.suffix == ".npy":
        _join_npy(out, parts, facts)
    else:
        _join_parquet(out, parts, facts)


def _join_npy(out: Path, parts: Sequence[Rows], facts: dict[str, Any]) -> None:
    # The names first: where the vectors are under their name, the names are too.
    with atomic_path(names_path(out)) as place, place.open("w", encoding="ascii") as file:
        encoder = {"encoder": facts["encoder"]}  # on the first line alone: whose vectors they are
        for part in parts:
            for number, name in zip(part.ids, part.names):
                file.write(json.dumps({"id": number, "path": name} | encoder) + "\n")
                encoder = {}
    header = {"descr": "<f4", "fortran_order": False, "shape": (sum(len(p.ids) for p in parts), facts["width"])}
    with atomic_path(out) as place, place.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(np.load(part.vectors, allow_pickle=False).astype("<f4", copy=False).tobytes())


def _as_text(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _join_parquet(out: Path, parts: Sequence[Rows], facts: dict[str, Any]) -> None:
    module = parquet()
    import pyarrow

    vector = pyarrow.list_(pyarrow.float32(), facts["width"])
    fields = [("id", pyarrow.int64()), ("path", pyarrow.string()), ("vector", vector)]
    # Parquet's strings are UTF-8: bytes of a name that are none (surrogates) are written as \udcXX there, and whole in
    # a column of their own.
    odd = any(_as_text(name) != name for part in parts for name in part.names)
    fields += [("path_bytes", pyarrow.binary())] if odd else []
    about = {"kontrast": json.dumps({key: facts[key] for key in ("version", "encoder", "recipe", "data")})}
    schema = pyarrow.schema(fields, metadata=about)
    with atomic_path(out) as place, module.ParquetWriter(place, schema) as writer:
        for part in parts:
            flat = pyarrow.array(np.load(part.vectors, allow_pickle=False).ravel())
            columns = [
                pyarrow.array(part.ids, pyarrow.int64()),
                pyarrow.array(map(_as_text, part.names), pyarrow.string()),
                pyarrow.FixedSizeListArray.from_arrays(flat, facts["width"]),
            ]
            if odd:
                columns.append(pyarrow.array([os.fsencode(name) for name in part.names], pyarrow.binary()))
            writer.write_table(pyarrow.table(columns, schema=schema))
