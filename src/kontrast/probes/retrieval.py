"""Retrieval across images and texts, as on Flickr8k: is the right one among the K most similar?

N images, M captions, T distinct texts, D width of the projections.

    text to image   a caption finds its image: M queries
    image to text   an image finds one of its captions, any of them: N queries

The rank is one plus the number of wrong answers that are at least as similar as the right one, so that ties count
against the model: one that gives every pair the same similarity is at the bottom. A caption that another image also has
is right for both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.errors import DataError
from kontrast.probes.intervals import over_images
from kontrast.probes.result import Predictions, ProbeResult, result

KS = (1, 5, 10)
CHUNK = 1024
CURVE = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Ranks:
    """The ranks of a retrieval.

    Attributes:
        to_image: int64 [M], the rank of the image of each caption.
        to_text: int64 [N], the rank of the best caption of each image.
        owners: int64 [M], the image of each caption.
    """

    to_image: Tensor
    to_text: Tensor
    owners: Tensor

    def recall(self, k: int) -> tuple[float, float]:
        """Return the shares of images that find a caption, and of captions that find their image, among the first k."""
        return float((self.to_text <= k).double().mean()), float((self.to_image <= k).double().mean())

    def curve(self) -> list[tuple[int, float, float]]:
        """Return k, image to text and text to image for growing k."""
        return [(k, *self.recall(k)) for k in CURVE if k <= max(len(self.to_text), 10)]


def retrieval_ranks(images: Tensor, texts: Tensor, ids: Tensor, starts: Tensor) -> Ranks:
    """Rank all captions for each image, and all images for each caption.

    Args:
        images: projections of the images.
        texts: projections of the distinct texts.
        ids: the text of each caption, image by image.
        starts: image i has the captions starts[i] to starts[i+1] - 1.

    Shape:
        images [N,D], texts [T,D], ids int64 [M], starts int64 [N+1].

    Example:
        >>> ranks = retrieval_ranks(torch.eye(3), torch.eye(3), torch.arange(3), torch.arange(4))
        >>> ranks.to_image.tolist(), ranks.recall(1)
        ([1, 1, 1], (1.0, 1.0))
    """
    if not bool(torch.isfinite(images).all() and torch.isfinite(texts).all()):
        raise DataError("projections are not finite")
    images, texts = (normalize(x.float(), dim=-1) for x in (images, texts))
    ids, counts = ids.to(images.device), torch.bincount(ids, minlength=len(texts)).to(images.device)
    owners = torch.repeat_interleave(torch.arange(len(images)), starts.diff().cpu()).to(images.device)
    rank_of_text = torch.empty(len(texts), dtype=torch.int64, device=images.device)
    best = torch.full((len(images),), -torch.inf, device=images.device)
    for rows, similarity, right in tiles(images, texts, ids, owners):
        own = similarity.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        rank_of_text[rows] = 1 + ((similarity >= own) & ~right).sum(1)
        best = torch.maximum(best, similarity.masked_fill(~right, -torch.inf).amax(0))
    wrong = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    for rows, similarity, right in tiles(images, texts, ids, owners):
        wrong += (((similarity >= best) & ~right) * counts[rows, None]).sum(0)
    return Ranks(rank_of_text[ids].cpu(), (1 + wrong).cpu(), owners.cpu())


def tiles(images: Tensor, texts: Tensor, ids: Tensor, owners: Tensor):
    """Yield texts in chunks: which ones, their similarities [t,N], and which of the images are right for them."""
    for start in range(0, len(texts), CHUNK):
        rows = slice(start, min(start + CHUNK, len(texts)))
        inside = (ids >= rows.start) & (ids < rows.stop)
        right = torch.zeros(rows.stop - rows.start, len(images), dtype=torch.bool, device=images.device)
        right[ids[inside] - rows.start, owners[inside]] = True
        # Each similarity is computed alike in both passes: the chunks are the same.
        yield rows, texts[rows] @ images.T, right


def retrieval(ranks: Ranks, seed: int = 0) -> list[ProbeResult]:
    """Return recall at 1, 5 and 10 in both directions, with intervals over images.

    Args:
        ranks: as `retrieval_ranks` returns them.
        seed: of the result.

    Example:
        >>> ranks = retrieval_ranks(torch.eye(20), torch.eye(20), torch.arange(20), torch.arange(21))
        >>> print(retrieval(ranks)[0])
        image-to-text-r1: 100.00% [100.00, 100.00] over 20 test images
    """
    results = []
    for name, found, owners in (
        ("image-to-text", ranks.to_text, None),
        ("text-to-image", ranks.to_image, ranks.owners),
    ):
        for k in KS:
            hits = found <= k
            per_image = hits.double() if owners is None else mean_by(hits.double(), owners, len(ranks.to_text))
            low, high = over_images(per_image)
            median = float(np.median(found.numpy()))
            protocol = {"k": k, "images": len(per_image)}
            one = result(f"{name}-r{k}", Predictions(hits), protocol, seed, median_rank=median)
            results.append(replace(one, low=low, high=high))
    return results


def mean_by(values: Tensor, owners: Tensor, count: int) -> Tensor:
    """Return the mean of the values of each owner [count]."""
    sums = torch.zeros(count, dtype=values.dtype).index_add_(0, owners, values)
    return sums / torch.bincount(owners, minlength=count)
