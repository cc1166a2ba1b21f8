"""Measures of a batch of projections, made from the same statistics as the objectives.

V views, B images, D width.  z [V,B,D]; also [B,D] for measures without positives. The images of all ranks count.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.objectives.arguments import positive, weight
from kontrast.objectives.inputs import check_inputs
from kontrast.objectives.pairs import Pairs


def conditional_entropy(z: Tensor, t_minus: float = 2.0) -> Tensor:
    r"""H(X-|X): how many negatives share an anchor's repulsion, at most log(B - 1) (CACR, equation 8).

        H = mean_i -sum_j w_ij log w_ij = mean_i [ lse_i(a) - a mean_i(a) ],  a = 2 t_minus

    The negatives j are the other images of the same view.

    Args:
        z: projections.
        t_minus: sharpness of the weights w, at least 0.

    Shape:
        z [V,B,D] or [B,D]; the result is a scalar.

    Example:
        >>> conditional_entropy(torch.eye(4))  # log 3: all three negatives count the same
        tensor(1.0986)
    """
    a = 2 * weight("t_minus", t_minus)
    rows = _pairs_without_positives(z).same_view(a, with_mean=True)
    return distributed.mean((rows.lse - a * rows.mean).mean())


def coupling_multiplier(z: Tensor, temperature: float = 0.1) -> Tensor:
    """The factor q in (0,1) between NT-Xent's gradient at each anchor of this rank and DCL's (DCL, proposition 1).

    With more than two views it is the factor of the gradient to the negatives.

    Args:
        z: projections.
        temperature: tau, divides the similarities.

    Shape:
        z [V,B,D]; the result [V,B].

    Example:
        >>> coupling_multiplier(torch.eye(2).expand(2, 2, 2), temperature=1.0)  # 2 / (2 + e)
        tensor([[0.4239, 0.4239],
                [0.4239, 0.4239]])
    """
    pairs, scale = Pairs(check_inputs(z), normalize=True), 1 / positive("temperature", temperature)
    positives = pairs.reduce_positives(lambda s: torch.logsumexp(scale * s, dim=-1))
    return torch.sigmoid(pairs.negatives(scale).lse - positives)


def alignment(z: Tensor, alpha: float = 2.0) -> Tensor:
    """Mean distance of positives to the power alpha; 0 if all views of an image agree.

    Args:
        z: projections.
        alpha: power of the distance.

    Shape:
        z [V,B,D]; the result is a scalar.

    Example:
        >>> alignment(torch.stack([torch.eye(3), -torch.eye(3)]))  # opposite points of the sphere
        tensor(4.)
    """
    pairs = Pairs(check_inputs(z), normalize=True)
    return distributed.mean(pairs.distance(pairs.links, positive("alpha", alpha)).mean())


def uniformity(z: Tensor, t: float = 2.0) -> Tensor:
    """Log of the mean of exp(-t ||z_i - z_j||^2) over pairs of images, averaged over views; lower is more uniform.

    Args:
        z: projections.
        t: sharpness of the kernel.

    Shape:
        z [V,B,D] or [B,D]; the result is a scalar.

    Example:
        >>> uniformity(torch.eye(3))  # all squared distances are 2
        tensor(-4.)
    """
    pairs, scale = _pairs_without_positives(z), 2 * positive("t", t)
    rows = pairs.same_view(scale)
    return pairs.log_mean_exp(rows.lse).mean() - scale - math.log(pairs.N - 1)


def _pairs_without_positives(z: Tensor) -> Pairs:
    """Return normalized pairs of one view or several. A single view is its own key, to pass the check for two views."""
    one = isinstance(z, Tensor) and (z.ndim == 2 or (z.ndim == 3 and z.shape[0] == 1))
    inputs = check_inputs(z, keys=z if one else None)
    return Pairs(inputs._replace(keys=None), normalize=True)
