"""k nearest neighbours by cosine, each voting with weight exp(similarity / temperature).

N train rows, T test rows, F width, k neighbours, C classes. Both sides stream in chunks and a running top-k is merged,
so memory is that of one chunk of similarities, whatever N and T.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.errors import UsageError
from kontrast.probes.result import ProbeResult, checked, result

ROWS, QUERIES = 16_384, 1_024


def nearest_rows(
    queries: Tensor, rows: Tensor, k: int, *, query_chunk: int = QUERIES, row_chunk: int = ROWS, cosine: bool = False
) -> tuple[Tensor, Tensor]:
    """The k most similar rows of each query, best first: similarities [T,k] and indices [T,k]. The similarity is the
    product; with `cosine`, rows are normalised chunk by chunk, so that a mapped file of any size is never copied."""
    found = []
    for q in queries.split(query_chunk):
        best, where = q.new_empty(len(q), 0), torch.empty(len(q), 0, dtype=torch.int64, device=q.device)
        for start in range(0, len(rows), row_chunk):
            chunk = rows[start : start + row_chunk]
            s = q @ (normalize(chunk, dim=1) if cosine else chunk).T
            s, j = s.topk(min(k, s.shape[1]), dim=1)
            best, where = torch.cat([best, s], 1), torch.cat([where, j + start], 1)
            best, order = best.topk(min(k, best.shape[1]), dim=1)
            where = where.gather(1, order)
        found.append((best, where))
    return torch.cat([b for b, _ in found]), torch.cat([w for _, w in found])


def votes(similarities: Tensor, labels: Tensor, temperature: float, classes: int) -> Tensor:
    """Summed weights exp(s/T) per class [T,C]; the best similarity is subtracted so that no T overflows."""
    weights = ((similarities - similarities[:, :1]) / temperature).exp()
    return weights.new_zeros(len(weights), classes).scatter_add_(1, labels, weights)


@torch.inference_mode()
def knn(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    k: int = 200,
    temperature: float = 0.1,
    classes: int | None = None,
    seed: int = 0,
) -> ProbeResult:
    """Weighted kNN on L2-normalised features (k = 200, temperature 0.1 unless told).

    Where train has fewer than k rows, k becomes one less than their number, and the result's note says so.
    """
    if k < 1 or not temperature > 0:
        raise UsageError(f"k = {k}, temperature = {temperature}: both must be positive")
    train, train_labels, test, test_labels, classes = checked(train, train_labels, test, test_labels, classes)
    note = ""
    if k > len(train):
        note, k = f"k = {k} exceeds the {len(train)} train images: k = {len(train) - 1} used", len(train) - 1
    queries = normalize(test, dim=1)
    correct = []
    for q, labels in zip(queries.split(QUERIES), test_labels.split(QUERIES)):
        s, j = nearest_rows(q, train, k, cosine=True)
        correct.append(votes(s, train_labels[j], temperature, classes).argmax(1) == labels)
    return result("knn", torch.cat(correct), {"k": k, "temperature": temperature}, seed, note)
