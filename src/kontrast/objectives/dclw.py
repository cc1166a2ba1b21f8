"""V query views, B images, N images of all ranks, P links of views.  similarity and w [P,B], negatives [V,B]."""

from __future__ import annotations

import math

import torch

from kontrast import distributed
from kontrast.objectives.arguments import Number, number, positive, switch
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.dcl import UNBOUNDED
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("dclw")
class DCLW(Objective):
    r"""DCL with weighted positives: pairs that are farther apart than others are pulled harder (DCL, as published).

        loss_i = -w_i <z_i, z_i+>/tau + log sum_{j: other images} exp(<z_i, z_j>/tau)
        w_i    = 2 - exp(<z_i, z_i+>/sigma) / mean_j exp(<z_j, z_j+>/sigma)

    The weights have mean 1 over the images of all ranks and are at most 2. If one pair is aligned and most others are
    not, its weight is very negative.

    When to use it: if some pairs of views are much harder than others and you already use DCL. The weights get very
    negative for a pair that is aligned while most are not, so watch the first epochs. If you are not sure, take DCL.

    Reference: Yeh et al., Decoupled Contrastive Learning, ECCV 2022.

    Args:
        temperature: tau, divides the similarities.
        sigma: divides the similarities in the weights.
        detach: treat the weights as constants in the gradient.
        clamp: lower limit of the weights, below 2. None: no limit.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import DCLW
        >>> DCLW(temperature=0.5)(torch.eye(4), torch.eye(4))
        tensor(-0.2082)
    """

    paper = "DCL, as published"
    equation = r"""
        \ell_i = -w_i \frac{\langle z_i, z_i^+ \rangle}{\tau}
            + \log \sum_{j \neq i} e^{\langle z_i, z_j \rangle / \tau},
        w_i = 2
            - \frac{e^{\langle z_i, z_i^+ \rangle / \sigma}}{\mathrm{mean}_j\, e^{\langle z_j, z_j^+ \rangle / \sigma}}
    """
    takes_bank = True

    def __init__(
        self, temperature: Number = 0.1, sigma: Number = 0.5, *, detach: bool = True, clamp: Number | None = None,
        normalize: bool = True, reduction: str = "mean",
    ):  # fmt: skip
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature, not_learned=UNBOUNDED)
        self.sigma = positive("sigma", sigma)
        self.detach = switch("detach", detach)
        self.clamp = None if clamp is None else number("clamp", clamp, below=2.0)

    def contrast(self, pairs: Pairs) -> Terms:
        similarity = pairs.similarity(pairs.links)
        scores = (similarity.detach() if self.detach else similarity) / self.sigma
        log_mean = torch.logsumexp(distributed.gather(scores, dim=1), dim=1, keepdim=True) - math.log(pairs.N)
        w = 2 - torch.exp(scores - log_mean)
        w = w if self.clamp is None else w.clamp(min=self.clamp)
        return Terms(
            attraction=pairs.mean_over_positives(-w * similarity / self.temperature),
            repulsion=pairs.negatives(scale=1 / self.temperature).lse,
        )
