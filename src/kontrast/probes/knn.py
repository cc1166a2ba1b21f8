"""k nearest neighbors by cosine similarity, each voting with weight exp(similarity / temperature).

N train rows, T test rows, F width, k neighbors, C classes. Both sides are read in chunks and a running top-k is merged,
so memory is that of one chunk of similarities for any N and T.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.errors import UsageError
from kontrast.probes.result import ProbeResult, check_features, join_predictions, predictions, result

ROWS, QUERIES = 16_384, 1_024


def nearest_rows(
    queries: Tensor, rows: Tensor, k: int, *, query_chunk: int = QUERIES, row_chunk: int = ROWS, cosine: bool = False
) -> tuple[Tensor, Tensor]:
    """Find the k rows with the largest dot product for each query.

    Args:
        queries: features [T,F].
        rows: features [N,F] to search, also memory-mapped.
        k: neighbors per query.
        query_chunk: queries per product.
        row_chunk: rows per product.
        cosine: normalize each chunk of rows first, so that a mapped file is never copied as a whole.

    Returns:
        Similarities [T,k] and row indices [T,k], best first.

    Example:
        >>> nearest_rows(torch.eye(3), torch.eye(3), k=1)[1].flatten()
        tensor([0, 1, 2])
    """
    found = []
    for q in queries.split(query_chunk):
        best, indices = q.new_empty(len(q), 0), torch.empty(len(q), 0, dtype=torch.int64, device=q.device)
        for start in range(0, len(rows), row_chunk):
            chunk = rows[start : start + row_chunk]
            s = q @ (normalize(chunk, dim=1) if cosine else chunk).T
            s, j = s.topk(min(k, s.shape[1]), dim=1)
            best, indices = torch.cat([best, s], 1), torch.cat([indices, j + start], 1)
            best, order = best.topk(min(k, best.shape[1]), dim=1)
            indices = indices.gather(1, order)
        found.append((best, indices))
    return torch.cat([b for b, _ in found]), torch.cat([i for _, i in found])


def votes(similarities: Tensor, labels: Tensor, temperature: float, classes: int) -> Tensor:
    """Sum the weights exp(s/temperature) per class [T,C], less the best similarity so that nothing overflows."""
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
    seed: int = 0,
) -> ProbeResult:
    """Classify each test image by a weighted vote of its k nearest train images (cosine similarity).

    Args:
        train: train features [N,F].
        train_labels: integers [N].
        test: test features [T,F].
        test_labels: integers [T].
        k: neighbors that vote, default 200. If there are fewer train images, k becomes N - 1 and `note` reports it.
        temperature: divides the similarity in a neighbor's weight exp(similarity / temperature), default 0.1.
        seed: seed of the bootstrap interval; the vote itself is not random.

    Example:
        >>> y = torch.arange(20) % 2
        >>> knn(torch.eye(2)[y], y, torch.eye(2)[y], y, k=5).accuracy
        1.0
    """
    if k < 1 or not temperature > 0:
        raise UsageError(f"k = {k}, temperature = {temperature}: both must be positive")
    train, train_labels, test, test_labels, classes = check_features(train, train_labels, test, test_labels)
    note = ""
    if k > len(train):
        note, k = f"k = {k} exceeds the {len(train)} train images: using k = {len(train) - 1}", len(train) - 1
    queries = normalize(test, dim=1)
    parts = []
    for q, labels in zip(queries.split(QUERIES), test_labels.split(QUERIES)):
        s, j = nearest_rows(q, train, k, cosine=True)
        scores = votes(s, train_labels[j], temperature, classes)
        parts.append(predictions(scores.masked_fill(scores == 0, -torch.inf), labels))  # no votes, no prediction
    return result("knn", join_predictions(parts), {"k": k, "temperature": temperature}, seed, note)
