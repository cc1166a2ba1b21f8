"""Features to the plane: PCA, then exact t-SNE, small enough to read and quick enough for a report.

Shapes: N points, F features, C <= 50 principal components. P [N,N] are the affinities of the features (sum 1), Y [N,2]
the places in the plane, K [N,N] the Student kernel 1 / (1 + |y_i - y_j|^2) of those places, Q = K / sum K.

t-SNE: van der Maaten and Hinton, "Visualizing Data using t-SNE", JMLR 2008.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

COMPONENTS = 50
LIMIT = 5_000
FEWEST = 8
EXAGGERATION = 12.0
HALVINGS = 40


def embed_2d(features: Tensor, *, seed: int = 0, iterations: int = 500, perplexity: float = 30.0) -> Tensor:
    """Places [N,2] for features [N,F]: like features stand together. The same seed gives the same map.

    Entries that are not finite count as their column's mean. Fewer than 8 points, or points that are all equal, get
    their first two principal components; more than 5,000 are refused, since the exact method needs N x N numbers.
    """
    if features.ndim != 2:
        raise ValueError(f"features must be [N,F], given {list(features.shape)}")
    if len(features) > LIMIT:
        raise ValueError(f"the map takes at most {LIMIT:,} points, given {len(features):,}: draw a sample first")
    if iterations < 0 or not perplexity > 0:
        raise ValueError(f"iterations must be >= 0 and perplexity > 0, given {iterations} and {perplexity}")
    with torch.no_grad():
        components = principal_components(features, COMPONENTS)
        start = _two_columns(components)
        if len(start) < FEWEST or not components.any():
            return start
        affinities = joint_affinities(components, min(perplexity, (len(start) - 1) / 3))
        noise = torch.randn(start.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        places = 1e-4 * (start / start[:, 0].std().clamp_min(1e-12) + 0.01 * noise)
        return _descend(affinities, places, iterations)


def principal_components(features: Tensor, count: int) -> Tensor:
    """Coordinates [N,C] along the widest directions, in float32, scaled so that the largest entry is of order one."""
    x = _finite(features.detach().to("cpu", torch.float64))
    x = x - x.mean(0) if len(x) else x
    x = x / x.abs().amax().clamp_min(1e-300) if x.numel() else x
    if min(x.shape) == 0 or x.abs().amax() < 1e-12:
        return torch.zeros(len(x), min(count, x.shape[1]))
    values, directions = torch.linalg.eigh(x.T @ x if x.shape[1] <= len(x) else x @ x.T)
    values, directions = values.flip(0)[:count].clamp_min(0), directions.flip(1)[:, :count]
    scores = x @ directions if x.shape[1] <= len(x) else directions * values.sqrt()
    # An eigenvector's sign is arbitrary and differs between LAPACK builds: the entry of largest size is made positive.
    largest = scores.gather(0, scores.abs().argmax(0, keepdim=True))
    return (scores * torch.where(largest < 0, -1.0, 1.0)).float()


def joint_affinities(points: Tensor, perplexity: float) -> Tensor:
    """P [N,N]: Gaussian neighbourhoods whose entropy is log(perplexity), made symmetric, summing to one."""
    distances = torch.cdist(points, points).square_()
    distances.fill_diagonal_(math.inf)
    distances -= distances.amin(1, keepdim=True)
    # Work relative to the typical distance, so that one bracket of precisions fits features of any scale.
    distances /= distances.masked_fill(distances.isinf(), 0).mean().clamp_min(1e-20)
    low, high = torch.full((len(points), 1), -10.0), torch.full((len(points), 1), 15.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        weights = torch.softmax(-distances * middle.exp(), 1)
        wide = torch.special.entr(weights).sum(1, keepdim=True) > math.log(perplexity)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    return (weights + weights.T) / (2 * len(points))


def _descend(affinities: Tensor, places: Tensor, iterations: int) -> Tensor:
    """Gradient descent with momentum and gains; affinities are exaggerated for the first third."""
    count = len(places)
    rate = max(count / EXAGGERATION / 4, 50.0)
    velocity, gains = torch.zeros_like(places), torch.ones_like(places)
    kernel, product = torch.empty(count, count), torch.empty(count, count)
    early = min(250, iterations // 3)
    for step in range(iterations):
        gradient = _gradient(affinities, places, EXAGGERATION if step < early else 1.0, kernel, product)
        gains = torch.where(gradient * velocity > 0, gains * 0.8, gains + 0.2).clamp_min_(0.01)
        velocity = (0.5 if step < early else 0.8) * velocity - rate * gains * gradient
        places = places + velocity
        places = places - places.mean(0)
    return places


def _gradient(affinities: Tensor, places: Tensor, exaggeration: float, kernel: Tensor, product: Tensor) -> Tensor:
    """4 sum_j (e P_ij - Q_ij) K_ij (y_i - y_j), in few passes over the N x N memory: it is what the time goes to."""
    one = torch.ones(len(places), 1)
    square = places.square().sum(1, keepdim=True)
    torch.mm(torch.cat([-2 * places, square, one], 1), torch.cat([places, one, 1 + square], 1).T, out=kernel)
    kernel.clamp_min_(1.0).reciprocal_().fill_diagonal_(0.0)
    total = kernel.sum()
    both = torch.cat([places, one], 1)
    attract = torch.mul(affinities, kernel, out=product) @ both
    repel = kernel.square_() @ both
    weight = exaggeration * attract - repel / total
    return 4 * (weight[:, 2:] * places - weight[:, :2])


def _finite(x: Tensor) -> Tensor:
    """Every entry that is not finite becomes its column's mean over the finite ones, or 0 where there are none."""
    good = x.isfinite()
    if good.all():
        return x
    x = torch.where(good, x, 0.0)
    return torch.where(good, x, x.sum(0) / good.sum(0).clamp_min(1))


def _two_columns(components: Tensor) -> Tensor:
    return torch.nn.functional.pad(components[:, :2], (0, max(0, 2 - components.shape[1])))
