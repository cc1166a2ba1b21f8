"""What a batch of projections is, by the statistics that the objectives are made of.

V views, B images, D width.  z [V,B,D], or [B,D] for one view where no positives are asked for. All ranks' images count.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.objectives.arguments import positive, weight
from kontrast.objectives.inputs import checked
from kontrast.objectives.pairs import Pairs


def conditional_entropy(z: Tensor, t_minus: float = 2.0) -> Tensor:
    r"""H(X-|X): how many negatives share an anchor's repulsion, at most log(B - 1) (CACR, equation 8).

    H = mean_i -sum_j w_ij log w_ij = mean_i [ lse_i(a) - a mean_i(a) ],  a = 2 t_minus,  other images of the same view
    """
    a = 2 * weight("t_minus", t_minus)
    rows = _of_views(z).same_view(a, with_mean=True)
    return distributed.mean((rows.lse - a * rows.mean).mean())


def coupling_multiplier(z: Tensor, temperature: float = 0.1) -> Tensor:
    """The factor q in (0,1) by which NT-Xent's gradient at each anchor of this rank falls short of DCL's: [V,B]. With
    more than two views it is that of the gradient to the negatives."""
    pairs, scale = Pairs(checked(z, None, None, None, None), normalize=True), 1 / positive("temperature", temperature)
    positives = pairs.over_positives(lambda s: torch.logsumexp(scale * s, dim=-1))
    return torch.sigmoid(pairs.negatives(scale).lse - positives)


def alignment(z: Tensor, alpha: float = 2.0) -> Tensor:
    """Mean distance of positives to the power alpha; 0 where all views of an image agree."""
    pairs = Pairs(checked(z, None, None, None, None), normalize=True)
    return distributed.mean(pairs.distance(pairs.links, positive("alpha", alpha)).mean())


def uniformity(z: Tensor, t: float = 2.0) -> Tensor:
    """Mean over views of the log of the mean of exp(-t ||z_i - z_j||^2) over pairs of images; lower is more uniform."""
    pairs = _of_views(z)
    rows = pairs.same_view(2 * positive("t", t))
    return pairs.log_mean_exp(rows.lse).mean() - 2 * t - math.log(pairs.N - 1)


def _of_views(z: Tensor) -> Pairs:
    """One view or several, of unit rows; one view stands beside itself for the check, which asks for two."""
    one = isinstance(z, Tensor) and (z.ndim == 2 or (z.ndim == 3 and z.shape[0] == 1))
    inputs = checked(z, None, z if one else None, None, None)
    return Pairs(inputs._replace(keys=None), normalize=True)
