"""How good a representation may be, without labels: RankMe, alpha-ReQ and LiDAR, in float64.

N images, D width, q views of each image, M = min(N, D).

None of them sees what the images are. RankMe and LiDAR rise with noise that fills all directions: read them together
with the alignment, and never maximize one alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kontrast.errors import DataError

NOTHING = 1e-12


def rankme(rows: Tensor, *, centered: bool = True, epsilon: float = 1e-7) -> float:
    r"""Return RankMe, the exponential of the entropy of the singular values' shares (Garrido et al., equation 1).

        exp(-sum_k p_k log p_k),  p_k = sigma_k / sum_j sigma_j + epsilon

    Args:
        rows: Projections or features.
        centered: Subtract the mean first (default). The paper does not, and then an offset that all rows have in common
            hides the other directions: 17.3 becomes 2.0 for 32 directions with the spectrum 1/k.
        epsilon: The paper's 1e-7. With 1e-5 the rank of one direction among 2,048 would be 1.27.

    Shape:
        rows: [N,D].

    Example:
        >>> import torch, kontrast
        >>> round(kontrast.lens.rankme(torch.cat([torch.eye(6), -torch.eye(6)])), 3)
        6.0
    """
    x = _rows(rows)
    sigma = torch.linalg.svdvals(x - x.mean(0) if centered else x)
    if sigma.sum() <= NOTHING * x.abs().sum():  # all rows are the same; what is left is rounding
        return 1.0
    p = sigma / sigma.sum() + epsilon
    return math.exp(-(p * p.log()).sum().item())


def alpha_req(rows: Tensor, *, first: int = 12, last: int = 50) -> float:
    r"""Return alpha-ReQ, the exponent of the decay of the covariance's eigenvalues (Agrawal et al.).

        the slope of ln lambda_i on -ln i for i = first ... last, least squares with the weights 1/i

    Features that transfer well have been found near 1, which is best neither larger nor smaller.

    Args:
        rows: Features or projections.
        first: The first eigenvalue that counts, from 1; default: 12, as in the authors' code.
        last: The last one; default: 50. Eigenvalues that are zero don't count.

    Returns:
        The exponent, or NaN if fewer than three eigenvalues count.

    Shape:
        rows: [N,D].

    Example:
        >>> import torch, kontrast
        >>> k = torch.arange(1, 65, dtype=torch.float64)
        >>> rows = torch.cat([torch.diag(k**-0.5), -torch.diag(k**-0.5)])  # eigenvalues proportional to 1/k
        >>> round(kontrast.lens.alpha_req(rows), 6)
        1.0
    """
    x = _rows(rows)
    values = torch.linalg.svdvals(x - x.mean(0)).square()
    kept = values[first - 1 : last]
    kept = kept[kept > NOTHING * values[0]]
    if len(kept) < 3:
        return math.nan
    i = torch.arange(first, first + len(kept), dtype=torch.float64)
    w, x, y = 1 / i, -i.log(), kept.log()
    x, y = x - (w * x).sum() / w.sum(), y - (w * y).sum() / w.sum()
    return ((w * x * y).sum() / (w * x * x).sum()).item()


class Lidar(NamedTuple):
    """LiDAR and what helps to read it.

    Attributes:
        value: LiDAR, from 1 to D.
        above_noise: The same of the eigenvalues minus 1/q, what noise without any image in it would have; 1 if none
            is larger than that.
        signal: The mean eigenvalue times q: 1 for pure noise; larger: views of an image agree.
    """

    value: float
    above_noise: float
    signal: float


def lidar(z: Tensor, *, delta: float = 1e-4) -> Lidar:
    r"""Return LiDAR, the rank of what tells images apart relative to what varies within an image (Thilak et al.).

        exp H(lambda / sum lambda),  lambda = eig(S_w^(-1/2) S_b S_w^(-1/2))

    with the covariance S_b of the images' means and S_w of views around the mean of their image, delta added to its
    diagonal. It is the largest for pure noise, whose eigenvalues are all near 1/q; compare `signal` with 1.

    Args:
        z: Projections of q augmented views of each image; q should be 10 or more, and N larger than D.
        delta: Keeps S_w invertible; default: the paper's 1e-4. With 0, a linear map of z changes nothing.

    Shape:
        z: [q,N,D], q at least 2.

    Example:
        >>> import torch, kontrast
        >>> noise = torch.randn(10, 400, 16, generator=torch.Generator().manual_seed(0))
        >>> found = kontrast.lens.lidar(noise)
        >>> found.value > 15, 0.9 < found.signal < 1.1
        (True, True)
    """
    z = torch.as_tensor(z).double()
    if z.ndim != 3 or len(z) < 2 or z.shape[1] < 2:
        raise DataError(f"LiDAR needs z [q,N,D] of at least 2 views of 2 images, given {list(z.shape)}")
    views, images, width = z.shape
    means = z.mean(0)
    between, within = means - means.mean(0), (z - means).flatten(0, 1)
    s_b = between.T @ between / (images - 1)
    s_w = within.T @ within / (images * (views - 1)) + delta * torch.eye(width, dtype=z.dtype, device=z.device)
    values, vectors = torch.linalg.eigh(s_w)
    scale = torch.where(values > NOTHING * values[-1], values.clamp_min(0).rsqrt(), 0.0)
    root = vectors * scale
    found = torch.linalg.eigvalsh(root.T @ s_b @ root).clamp_min(0)
    signal = views * found.mean().item()
    return Lidar(_exp_entropy(found), _exp_entropy((found - 1 / views).clamp_min(0)), signal)


def _exp_entropy(values: Tensor) -> float:
    """Return the exponential of the entropy of the shares; 1 if there is nothing to share."""
    if values.sum() <= 0:
        return 1.0
    return math.exp(torch.special.entr(values / values.sum()).sum().item())


def _rows(rows: Tensor) -> Tensor:
    x = torch.as_tensor(rows).double()
    if x.ndim != 2 or len(x) < 2:
        raise DataError(f"rows [N,D] of at least 2 images are needed, given {list(x.shape)}")
    return x
