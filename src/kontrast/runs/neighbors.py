"""The nearest neighbors of one image among the vectors of an embeddings file, and its groups of near-duplicates.

N rows of the file, F width, k neighbors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kontrast.errors import DataError, UsageError
from kontrast.lens.measures import directions
from kontrast.probes.knn import nearest_rows
from kontrast.runs.embed import encode, encoder_digest, own_embeddings
from kontrast.runs.embeddings_file import Embeddings, read_embeddings
from kontrast.runs.image_stream import one_image
from kontrast.runs.run import Run
from kontrast.training.device import choose_device

ROWS = 65_536


def neighbors(
    run: Run,
    image: str | Path,
    *,
    embeddings: str | Path | None = None,
    k: int = 8,
    float_range: tuple[float, float] | None = None,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """The k rows most like the image, best first: row, name and cosine. Without a file, the run's own train images.

    float_range: of the image, where it has float values and the run's recipe states no range or another.
    """
    if k < 1:
        raise UsageError(f"-k {k}: give at least 1")
    on = choose_device(device)
    encoder = run.encoder(on)
    asked = one_image(run, image, float_range)
    path = own_embeddings(run, device, say) if embeddings is None else Path(embeddings)
    file = read_embeddings(path, width=encoder.width)
    if file.encoder not in (None, encoder_digest(run)):
        raise DataError(f"{path} has the vectors of another encoder than {run.path}'s: embed its images again with it")
    query = directions(encode(encoder, asked, run.transform(), on))
    if k > len(file):
        say(f"-k {k}: {path} has {len(file)} rows, all are given")
    return _nearest(query, file, k)


def _nearest(query: torch.Tensor, file: Embeddings, k: int) -> list[dict[str, Any]]:
    """A file of any size, a stretch of rows at a time."""
    best, where = torch.empty(1, 0), torch.empty(1, 0, dtype=torch.int64)
    for start in range(0, len(file), ROWS):
        rows = directions(file.rows(slice(start, start + ROWS)))
        cosines, found = nearest_rows(query, rows, k)
        best, where = torch.cat([best, cosines], 1), torch.cat([where, found + start], 1)
        best, order = best.topk(min(k, best.shape[1]), dim=1)
        where = where.gather(1, order)
    pairs = zip(where[0].tolist(), best[0].tolist())
    return [{"row": row, "name": str(file.names[row]), "similarity": round(cosine, 6)} for row, cosine in pairs]
