"""Map features to the plane: PCA, then exact t-SNE, fast enough for a report.

Shapes: N points, F features, C <= 50 principal components. P [N,N] are the affinities of the features (sum 1), Y [N,2]
the positions in the plane, K [N,N] the Student kernel 1 / (1 + |y_i - y_j|^2) of those positions, Q = K / sum K.

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
PERPLEXITY = 30.0
HALVINGS = 40


def map_to_plane(features: Tensor, *, seed: int = 0, iterations: int = 500) -> Tensor:
    """Return positions [N,2] for features [N,F] that keep similar features together. The seed determines the map.

    Entries that are not finite count as their column's mean. Fewer than 8 points, or points that are all equal, get
    their first two principal components. The exact method needs N x N numbers, so N is at most `LIMIT`.
    """
    assert features.ndim == 2 and len(features) <= LIMIT, list(features.shape)
    with torch.no_grad():
        components = principal_components(features, COMPONENTS)
        start = torch.nn.functional.pad(components[:, :2], (0, max(0, 2 - components.shape[1])))
        if len(start) < FEWEST or not components.any():
            return start
        affinities = joint_affinities(components, min(PERPLEXITY, (len(start) - 1) / 3))
        noise = torch.randn(start.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        positions = 1e-4 * (start / start[:, 0].std().clamp_min(1e-12) + 0.01 * noise)
        return _descend(affinities, positions, iterations)


def principal_components(features: Tensor, count: int) -> Tensor:
    """Return float32 coordinates [N,C] along the widest directions, scaled so that the largest entry is about one."""
    x = features.detach().to("cpu", torch.float64)
    good = x.isfinite()
    x = torch.where(good, x, 0.0)
    x = torch.where(good, x, x.sum(0) / good.sum(0).clamp_min(1))
    x = x - x.mean(0) if len(x) else x
    x = x / x.abs().amax().clamp_min(1e-300) if x.numel() else x
    if min(x.shape) == 0 or x.abs().amax() < 1e-12:
        return torch.zeros(len(x), min(count, x.shape[1]))
    values, directions = torch.linalg.eigh(x.T @ x if x.shape[1] <= len(x) else x @ x.T)
    values, directions = values.flip(0)[:count].clamp_min(0), directions.flip(1)[:, :count]
    scores = x @ directions if x.shape[1] <= len(x) else directions * values.sqrt()
    # An eigenvector's sign is arbitrary and differs between LAPACK builds: make its largest entry positive.
    largest = scores.gather(0, scores.abs().argmax(0, keepdim=True))
    return (scores * torch.where(largest < 0, -1.0, 1.0)).float()


def joint_affinities(points: Tensor, perplexity: float) -> Tensor:
    """Return P [N,N]: Gaussian neighborhoods whose entropy is log(perplexity), made symmetric, summing to one."""
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


def _descend(affinities: Tensor, positions: Tensor, iterations: int) -> Tensor:
    """Descend with momentum and gains; affinities are exaggerated for the first third."""
    count = len(positions)
    rate = max(count / EXAGGERATION / 4, 50.0)
    velocity, gains = torch.zeros_like(positions), torch.ones_like(positions)
    kernel, product = torch.empty(count, count), torch.empty(count, count)
    early = min(250, iterations // 3)
    for step in range(iterations):
        gradient = _gradient(affinities, positions, EXAGGERATION if step < early else 1.0, kernel, product)
        gains = torch.where(gradient * velocity > 0, gains * 0.8, gains + 0.2).clamp_min_(0.01)
        velocity = (0.5 if step < early else 0.8) * velocity - rate * gains * gradient
        positions = positions + velocity
        positions = positions - positions.mean(0)
    return positions


def _gradient(affinities: Tensor, positions: Tensor, exaggeration: float, kernel: Tensor, product: Tensor) -> Tensor:
    """4 sum_j (e P_ij - Q_ij) K_ij (y_i - y_j), in few passes over the N x N memory, which take most of the time."""
    one = torch.ones(len(positions), 1)
    square = positions.square().sum(1, keepdim=True)
    torch.mm(torch.cat([-2 * positions, square, one], 1), torch.cat([positions, one, 1 + square], 1).T, out=kernel)
    kernel.clamp_min_(1.0).reciprocal_().fill_diagonal_(0.0)
    total = kernel.sum()
    both = torch.cat([positions, one], 1)
    attract = torch.mul(affinities, kernel, out=product) @ both
    repel = kernel.square_() @ both
    weight = exaggeration * attract - repel / total
    return 4 * (weight[:, 2:] * positions - weight[:, :2])
