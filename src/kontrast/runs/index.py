"""Index an embeddings file, so that the nearest of millions of vectors are found in milliseconds.

Vectors are assigned to centroids and coded, shard by shard; the shards are merged on disk. So the memory that is needed
does not depend on how many vectors there are, and an interrupted build goes on with the next shard. N rows, F width.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kontrast.errors import UsageError
from kontrast.files import disk_faults, remove_folder, sync, take_lock, write_atomic, write_json
from kontrast.probes import nearest_rows
from kontrast.registry import nearest
from kontrast.runs.embeddings_file import Embeddings, read_embeddings
from kontrast.runs.vector_index import (
    KINDS,
    VERSION,
    VectorIndex,
    digest_of,
    import_faiss,
    mark_of_file,
    open_index,
    relative_place,
    sample_queries,
    silenced,
)  # fmt: skip
from kontrast.training.progress import Progress

FLAT_BELOW = 50_000
"""Fewer rows are compared with all of them, which takes milliseconds."""
CODES = 8 << 30
"""Bytes. Vectors that need more as 8-bit codes are coded by product quantization, with F/4 bytes each."""
SHARD_BYTES = 256 << 20
"""Bytes of codes per shard."""
CHUNK = 65_536
PER_CENTROID = 40
"""Vectors per centroid that are clustered."""
MEASURED, TIMED, NEIGHBORS = 200, 3, 10
"""Recall is measured with so many queries and exact search is timed with so many, for so many neighbors."""
ENOUGH = 0.97
"""The recall at which no more lists are searched."""


@dataclass(frozen=True)
class IndexResult:
    """An index that was built; printed with its recall and time beside exact search."""

    path: Path
    facts: dict[str, Any]

    def __str__(self) -> str:
        f = self.facts
        lines = [f"{f['rows']:,} vectors of width {f['width']}: {f['kind']}, {f['bytes']:,} bytes"]
        if f["kind"] != "flat":
            lines += [f"{f['centroids']:,} centroids; {f['probes']} lists are searched per query"]
        lines += [
            f"{'lists' if one['lists'] else 'exact':>6} {one['lists'] or '':>5}  "
            f"recall@{NEIGHBORS} {one['recall']:.3f}  {one['ms']:8.2f} ms a query"
            for one in f["measured"]
        ]
        return "\n".join([*lines, f"index  {self.path}"])

    def to_dict(self) -> dict[str, Any]:
        return {"index": str(self.path), **self.facts}


def index(
    embeddings: str | os.PathLike[str], out: str | os.PathLike[str], *, kind: str = "auto",
    say: Callable[[str], None] = print,
) -> IndexResult:  # fmt: skip
    """Build an index of an embeddings file, for `neighbors` and `duplicates`; needs the extra `index`.

    Recall and time are measured against exact search with rows of the file as queries, and so many lists are searched
    that the recall of 10 neighbors is at least 0.97. An interrupted build goes on where it stopped.

    Args:
        embeddings: The embeddings file. Searching needs it too: it has the exact vectors and the names.
        out: The folder of the index, which is created.
        kind: "flat" (exact; nothing is stored), "ivf-8bit" (a byte per number), "ivf-pq" (a byte per four numbers), or
            "auto" (default), which chooses by size.
        say: Called with each line of progress; default: print.

    Returns:
        The result, which prints as a table; `path` is the folder.

    Example:
        >>> import kontrast
        >>> result = kontrast.index("vectors.npy", "vectors.index")
        >>> result.facts["kind"], result.facts["rows"]
        ('flat', 3)
    """
    if kind not in ("auto", *KINDS):
        raise UsageError(f"--kind {kind}: {nearest(kind, ('auto', *KINDS))}")
    source, place = Path(embeddings), Path(out)
    begun = any((place / name).exists() for name in ("index.json", "part"))
    if place.exists() and not begun and (not place.is_dir() or set(os.listdir(place)) - {".lock"}):
        raise UsageError(f"--out {place} exists and is no index: choose an empty or a new folder")
    file = read_embeddings(source)
    rows, width = file.vectors.shape
    chosen = choose_kind(rows, width) if kind == "auto" else kind
    with disk_faults(place):
        place.mkdir(parents=True, exist_ok=True)
        lock = take_lock(place / ".lock")
        try:
            facts = {"version": VERSION, "kind": chosen, "rows": rows, "width": width, "mark": mark_of_file(source)}
            facts |= {"embeddings": relative_place(source, place), "encoder": file.encoder, "probes": 1}
            if chosen == "flat":
                found = VectorIndex(place, facts, file)
            else:
                facts["centroids"] = centroids_for(rows)
                found = VectorIndex(place, facts, file, _build(place, facts, file, say))
                facts |= {"head": digest_of(place / "index.faiss")}
                facts |= {"lists_bytes": (place / "lists.ivfdata").stat().st_size}
            facts["measured"], facts["probes"] = _measure(found)
            facts["bytes"] = sum(path.stat().st_size for path in place.iterdir() if path.is_file())
            write_json(place / "index.json", facts)
        finally:
            os.close(lock)
    return IndexResult(place, open_index(place, source).facts)


def choose_kind(rows: int, width: int) -> str:
    """The kind of index for this many vectors."""
    if rows < FLAT_BELOW:
        return "flat"
    return "ivf-8bit" if rows * width <= CODES else "ivf-pq"


def centroids_for(rows: int) -> int:
    """About the square root of the number of rows, as a power of two: a query then sees as many centroids as codes per
    list. At least 16 rows per centroid."""
    return max(1, min(2 ** round(math.log2(math.sqrt(rows))), rows // 16))


def _build(place: Path, facts: dict[str, Any], file: Embeddings, say: Callable[[str], None]) -> Any:
    """Train, code shard by shard and merge; what an interrupted build has finished is used."""
    faiss = import_faiss()
    from faiss.contrib.ondisk import merge_ondisk

    work = place / "part"
    key = json.dumps({name: facts[name] for name in ("kind", "rows", "width", "mark", "centroids")}, sort_keys=True)
    if not (work / "key").is_file() or (work / "key").read_text("ascii", "replace") != key:
        remove_folder(work)
        work.mkdir()
        write_atomic(work / "key", key)
    (place / "index.json").unlink(missing_ok=True)  # from now on there is no index until this one is complete
    if not (work / "trained").is_file():
        say(f"cluster a sample into {facts['centroids']:,} centroids")
        _store(faiss, _train(faiss, facts, file), work / "trained")
    rows, width = facts["rows"], facts["width"]
    per_shard = max(CHUNK, SHARD_BYTES // (width + 8) // CHUNK * CHUNK)
    shards = [work / f"shard-{start}" for start in range(0, rows, per_shard)]
    done = sum(min(per_shard, rows - n * per_shard) for n, shard in enumerate(shards) if shard.is_file())
    with Progress("index", rows, done=done, unit="vectors") as bar:
        for number, shard in enumerate(shards):
            if not shard.is_file():
                part = faiss.read_index(str(work / "trained"))
                first, last = number * per_shard, min((number + 1) * per_shard, rows)
                for start in range(first, last, CHUNK):
                    end = min(start + CHUNK, last)
                    part.add_with_ids(file[start:end].numpy(), np.arange(start, end))
                    bar.advance(end - start)
                _store(faiss, part, shard)
    merged = faiss.read_index(str(work / "trained"))
    with silenced():
        merge_ondisk(merged, [str(shard) for shard in shards], str(place / "lists.ivfdata"))
    sync(place / "lists.ivfdata")
    _store(faiss, merged, place / "index.faiss")
    remove_folder(work)
    with silenced():
        return faiss.read_index(str(place / "index.faiss"), faiss.IO_FLAG_ONDISK_SAME_DIR)


def _train(faiss: Any, facts: dict[str, Any], file: Embeddings) -> Any:
    """An empty index with centroids and quantizer, from evenly spread rows."""
    width, count = facts["width"], facts["centroids"]
    coarse = faiss.IndexFlatIP(width)
    if facts["kind"] == "ivf-8bit":
        found = faiss.IndexIVFScalarQuantizer(
            coarse, width, count, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        )
    else:
        parts = next(n for n in range(max(1, width // 4), 0, -1) if width % n == 0)
        bits = min(8, int(math.log2(max(2, facts["rows"] // 39))))  # faiss wants 39 vectors per code word
        found = faiss.IndexIVFPQ(coarse, width, count, parts, bits, faiss.METRIC_INNER_PRODUCT)
    coarse.this.disown()
    found.own_fields = True
    found.cp.niter, found.cp.seed = 10, 0
    found.cp.min_points_per_centroid = 1
    sample, _ = sample_queries(file, max(PER_CENTROID * count, 10_000))
    found.train(sample.numpy())
    return found


def _store(faiss: Any, part: Any, path: Path) -> None:
    """Write an index so that the file is whole or absent."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    faiss.write_index(part, str(temporary))
    sync(temporary)
    os.replace(temporary, path)


def _measure(found: VectorIndex) -> tuple[list[dict[str, float]], int]:
    """Recall and milliseconds per query, for more and more lists until the recall is enough, and exactly; and the
    number of lists to search. A query is a row of the file, and itself is not counted among its neighbors."""
    queries, positions = sample_queries(found.file, MEASURED)
    k = min(NEIGHBORS, len(found.file) - 1)
    if not k:
        return [], 1
    exact = without_self(nearest_rows(queries, found.file, k + 1)[1], positions, k)  # type: ignore[arg-type]
    start = time.perf_counter()
    for query in queries[:TIMED]:  # one at a time, as through the index
        nearest_rows(query[None], found.file, k + 1)  # type: ignore[arg-type]
    last = {"lists": 0, "recall": 1.0, "ms": 1e3 * (time.perf_counter() - start) / len(queries[:TIMED])}
    if found.lists is None:
        return [last], 1
    measured, probes = [], 1
    while True:
        found.search(queries, k + 1, probes)  # the pages of the lists are read from disk once
        start = time.perf_counter()
        rows = torch.cat([found.search(query[None], k + 1, probes)[1] for query in queries])
        seconds = time.perf_counter() - start
        recall = recall_of(without_self(rows, positions, k), exact)
        measured.append({"lists": probes, "recall": recall, "ms": 1e3 * seconds / len(queries)})
        if recall >= ENOUGH or probes >= found.facts["centroids"]:
            return [*measured, last], probes
        step = max(1, 2 ** int(math.log2(probes)) // 2)  # 1, 2, 3, 4, 6, 8, 12, 16, ...
        probes = min(probes + step, found.facts["centroids"])


def without_self(rows: torch.Tensor, positions: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [Q,k]: the neighbors of each query other than the query itself."""
    own = rows == positions[:, None]
    order = torch.argsort(own.to(torch.uint8), dim=1, stable=True)
    return rows.gather(1, order)[:, :k]


def recall_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The share of the exact neighbors [Q,k] that were found [Q,k]."""
    return float((found[:, :, None] == exact[:, None, :]).any(1).float().mean())
