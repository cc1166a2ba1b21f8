"""V views, B images, N of all ranks.  log_g and log_u [V,B], indices [B], the buffer log_u [images]."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kontrast.objectives.arguments import NT_XENT_ALONE, Number, fixed, number, positive, refuse, whole
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.buffer_updates import buffer_on, gather_updates, update_in_backward
from kontrast.objectives.inputs import indices_below
from kontrast.objectives.pairs import Pairs
from kontrast.objectives.scheduled_number import on_device, scheduled_number


def share(name: str, value: Any) -> Number:
    """Check a number above 0 and at most 1."""
    found = number(name, value, above=0.0)
    if not isinstance(found, Tensor) and found > 1:
        refuse(name, value, "give a number above 0 and at most 1")
    return found


def running_estimate(log_old: Tensor, log_new: Tensor, gamma: Tensor) -> Tensor:
    """Return the log of (1 - gamma) old + gamma new, or that of new where nothing was stored."""
    mixed = torch.logaddexp(torch.log1p(-gamma) + log_old, torch.log(gamma) + log_new)
    return torch.where(torch.isneginf(log_old), log_new, mixed)


@OBJECTIVES.register("sogclr")
class SogCLR(Objective):
    r"""Repel each image from the whole data set, by a running estimate per image instead of a large batch (SogCLR).

        g_i    = mean_{j: rows of other images} exp(<z_i, z_j>/tau)
        u_i    = (1 - gamma) u_image + gamma g_i,      u_i = g_i if the image is new
        loss_i = -<z_i, z_i+> + tau log u_i,           gradient tau * grad[-<z_i, z_i+>/tau + (g_i/u_i) log g_i]

    g_i/u_i is constant in the gradient, which with gamma = 1 is tau times that of DCL. After each backward pass the
    mean of u_i over the views of an image is its new u_image. If an image is several times in the batch, its last place
    counts. The logs of u are stored in the buffer `log_u`, -inf for a new image, and are the same on all ranks.

    When to use it: if the batch can't be large and each image is seen many times: the estimate per image takes the
    place of more negatives. It stores one number per image, and needs some epochs before the estimates are good. On
    data that is seen once, take DCL or a bank.

    Reference: Yuan et al., Provable Stochastic Optimization for Global Contrastive Learning: Small Batch Does Not Harm
    Performance, ICML 2022.

    Args:
        images: number of images in the data set; indices must be less.
        temperature: tau, divides the similarities.
        gamma: share of the new batch in the estimate, above 0 and at most 1. It may be changed during training, also
            in a captured graph.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], indices [B]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import SogCLR
        >>> SogCLR(images=50_000)(torch.eye(4), torch.eye(4), indices=torch.tensor([7, 123, 49_999, 0]))
        tensor(-1.)
    """

    paper = "SogCLR (Yuan et al., 2022)"
    equation = r"""
        \ell_i = -\langle z_i, z_i^+ \rangle + \tau \log u_i,
        u_i \leftarrow (1 - \gamma)\, u_i + \gamma\, \mathrm{mean}_j\, e^{\langle z_i, z_j \rangle / \tau}
    """
    needs_indices = True
    log_u: Tensor
    gamma = scheduled_number("gamma", share)

    def __init__(self, images: int = 1_048_576, temperature: float = 0.1, gamma: float = 0.9, *,
                 normalize: bool = True, reduction: str = "mean"):  # fmt: skip
        super().__init__(normalize=normalize, reduction=reduction)
        self.images = whole("images", images) or refuse("images", images, "give the number of images in the data set")
        self.temperature = fixed("temperature", positive("temperature", temperature, not_learned=NT_XENT_ALONE))
        self.register_buffer("log_u", torch.full((self.images,), -torch.inf))
        self.gamma = fixed("gamma", share("gamma", gamma))

    def contrast(self, pairs: Pairs) -> Terms:
        log_g = pairs.negatives(1 / self.temperature).lse - math.log(pairs.negative_count)
        new = log_g.detach()
        indices, stored = indices_below(self.images, pairs.given.indices), buffer_on(new.device, self, "log_u")
        log_u = running_estimate(stored.index_select(0, indices).to(new.dtype), new, on_device(self, "gamma"))
        # The gradient of tau log u would have the factor gamma too, which the method leaves out.
        repulsion = self.temperature * (log_u + torch.exp(new - log_u) * (log_g - new))
        places, values = gather_updates(indices, torch.logsumexp(log_u, dim=0) - math.log(pairs.V))
        return Terms(attraction=-pairs.positive, repulsion=update_in_backward(repulsion, stored, values, places))
