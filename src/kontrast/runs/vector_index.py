"""An index of an embeddings file: a folder by which the nearest of many vectors are found without comparing all.

    INDEX/index.json      the embeddings file, the kind of index, how it is searched, and what that was measured to give
          index.faiss     centroids and quantizer, and
          lists.ivfdata   the coded vectors of each centroid, memory-mapped; both absent for the kind "flat"

Codes give candidates, which are then compared exactly, from the embeddings file.
N rows, F width, Q queries, k neighbors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kontrast.errors import DataError, EnvironmentFault
from kontrast.files import read_bytes
from kontrast.lens.measures import directions
from kontrast.operating_system import c_library
from kontrast.probes import nearest_rows
from kontrast.runs.embeddings_file import Embeddings, read_embeddings

VERSION = 1
QUERIES = 4096
"""Queries that are searched at once."""
KINDS = ("flat", "ivf-8bit", "ivf-pq")
CANDIDATES = {"flat": 1, "ivf-8bit": 4, "ivf-pq": 20}
"""For each neighbor that is asked for, so many candidates are compared exactly."""


def import_faiss() -> Any:
    """Import faiss, or raise an error that says how to install it."""
    try:
        import faiss
    except ImportError:
        raise EnvironmentFault("an index needs faiss: pip install 'kontrast[index]' (the package faiss-cpu)") from None
    return faiss


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Discard what faiss's native code prints on standard output, which belongs to the command's result."""
    libc = c_library()
    sys.stdout.flush()
    saved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        libc.fflush(None)  # its buffer would be written later
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)


@dataclass(frozen=True)
class VectorIndex:
    """An index that is open for searching.

    Attributes:
        path: its folder.
        facts: the content of index.json.
        file: the embeddings that were indexed.
        lists: the faiss index; None for the kind "flat".
    """

    path: Path
    facts: dict[str, Any]
    file: Embeddings
    lists: Any = None

    def search(self, queries: Tensor, k: int, probes: int | None = None) -> tuple[Tensor, Tensor]:
        """Find the k rows nearest to each query by cosine.

        Args:
            queries: unit vectors [Q,F].
            k: neighbors per query.
            probes: lists that are searched; default: the number that was measured to suffice.

        Returns:
            Cosines [Q,k] and rows [Q,k], nearest first; if fewer were found, -1 at the end.
        """
        if self.lists is None:
            return nearest_rows(queries, self.file, min(k, len(self.file)))  # type: ignore[arg-type]
        found = [self._search(part, k, probes or self.facts["probes"]) for part in queries.split(QUERIES)]
        return torch.cat([cosines for cosines, _ in found]), torch.cat([rows for _, rows in found])

    def _search(self, queries: Tensor, k: int, probes: int) -> tuple[Tensor, Tensor]:
        faiss = import_faiss()
        parameters = faiss.SearchParametersIVF(nprobe=probes)
        wanted = min(k * CANDIDATES[self.facts["kind"]], len(self.file))
        _, candidates = self.lists.search(queries.numpy(), wanted, params=parameters)
        missing = torch.from_numpy(candidates < 0)
        rows = np.maximum(candidates, 0)
        vectors = self.file[rows.reshape(-1)].view(*rows.shape, -1)
        cosines = (vectors @ queries[:, :, None])[:, :, 0].masked_fill(missing, -1.0)
        best, places = cosines.topk(min(k, wanted), dim=1)
        return best, torch.from_numpy(candidates).gather(1, places)


def mark_of_file(path: Path) -> dict[str, int]:
    """Size and date of an embeddings file, by which a later change is noticed."""
    status = path.stat()
    return {"bytes": status.st_size, "mtime": status.st_mtime_ns}


def open_index(path: str | os.PathLike[str], embeddings: str | os.PathLike[str] | None = None) -> VectorIndex:
    """Open an index and the embeddings file it is of.

    Args:
        path: the folder of the index.
        embeddings: the embeddings file, if it is no longer where it was.
    """
    path = Path(path)
    try:
        facts = json.loads(read_bytes(path / "index.json"))
        where, mark, kind = facts["embeddings"], facts["mark"], facts["kind"]
        rows, probes = int(facts["rows"]), int(facts["probes"])
        if facts["version"] != VERSION or kind not in KINDS or not isinstance(where, str) or min(rows, probes) < 1:
            raise ValueError("another version")
    except FileNotFoundError:
        raise DataError(f"no index {path}: make one with `kontrast index EMBEDDINGS --out {path}`") from None
    except (ValueError, KeyError, TypeError, RecursionError, NotADirectoryError):
        raise DataError(f"{path} is damaged, or no index of this version: make it again") from None
    source = Path(embeddings) if embeddings is not None else Path(os.path.normpath(path / where))
    if not source.is_file():
        raise DataError(f"{source}, which {path} is the index of, is gone: name it with --embeddings")
    if mark_of_file(source) != mark:
        raise DataError(f"{source} is not the file that {path} is the index of: make the index again")
    file = read_embeddings(source, checked=True)
    if len(file) != rows:
        raise DataError(f"{source} has {len(file)} rows, {path} is the index of {rows}: make the index again")
    return VectorIndex(path, facts, file, None if kind == "flat" else _open_lists(path, facts, file))


def _open_lists(path: Path, facts: dict[str, Any], file: Embeddings) -> Any:
    faiss = import_faiss()
    head, lists = path / "index.faiss", path / "lists.ivfdata"
    try:
        sound = digest_of(head) == facts["head"] and lists.stat().st_size == facts["lists_bytes"]
    except (OSError, KeyError):
        sound = False
    if not sound:
        raise DataError(
            f"{path} is damaged: {head.name} or {lists.name} is missing or has other content; make it again"
        )
    # The file of the lists is looked for beside the index, whatever path is written inside it.
    with silenced():
        found = faiss.read_index(str(head), faiss.IO_FLAG_ONDISK_SAME_DIR)
    if found.ntotal != len(file) or found.d != file.vectors.shape[1]:
        raise DataError(f"{path} has {found.ntotal} vectors of width {found.d}, its file has others: make it again")
    return found


def digest_of(path: Path) -> str:
    return hashlib.sha256(read_bytes(path)).hexdigest()


def relative_place(embeddings: Path, index: Path) -> str:
    """How index.json names the embeddings file, so that both can be moved together."""
    return os.path.relpath(embeddings.resolve(), index.resolve())


def sample_queries(file: Embeddings, count: int) -> tuple[Tensor, Tensor]:
    """Rows [Q,F] of the file as unit vectors, evenly spread, and their positions: queries to measure an index with."""
    rows, positions = file.sample(count)
    return directions(rows), positions
