"""Parts of embeddings to one file, written aside part by part and renamed when whole.

N rows, F width.  .npy: float32 [N,F] with the names beside it. .parquet: columns id, path, vector.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kontrast.lens.embeddings import names_path, parquet
from kontrast.training.folder import aside


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
    with aside(names_path(out)) as place, place.open("w", encoding="ascii") as file:
        encoder = {"encoder": facts["encoder"]}  # on the first line alone: whose vectors they are
        for part in parts:
            for number, name in zip(part.ids, part.names):
                file.write(json.dumps({"id": number, "path": name} | encoder) + "\n")
                encoder = {}
    header = {"descr": "<f4", "fortran_order": False, "shape": (sum(len(p.ids) for p in parts), facts["width"])}
    with aside(out) as place, place.open("wb") as file:
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
    with aside(out) as place, module.ParquetWriter(place, schema) as writer:
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
