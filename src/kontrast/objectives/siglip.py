"""V query views, B images, P links of a query view with a key view.  similarity and sums of softplus [P,B]."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from kontrast.objectives.arguments import number, positive
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("siglip")
class SigLIP(Objective):
    r"""Sigmoid loss of images and texts: is this pair of an image and a text a match, for every pair (SigLIP).

        loss_i = softplus(-(t s_ii + b)) + sum_{j: other images} softplus(t s_ij + b),   s_ij = <z_i, z'_j>,   t = 1/tau

    Call `objective(images, texts)`. The loss is the mean over images, not over pairs. With more views, each pair of
    views counts once; with keys, every key view of an image matches. Images with the same label are no negatives of
    each other, for example two captions of one image.

    Reference: Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023.

    Args:
        temperature: tau, divides the similarities. `learned` trains the parameter t' = log(1/tau), from log 10.
        bias: b, any number. `learned` trains the parameter b, from -10, so that few pairs match at the start.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], labels [B]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import SigLIP
        >>> SigLIP(temperature=0.1, bias=-5.0)(torch.eye(4), torch.eye(4))  # softplus(-5) + 3 softplus(-5)
        tensor(0.0269)
    """

    paper = "SigLIP, equation 1"
    takes_labels = True

    def __init__(
        self, temperature: float | str = "learned", bias: float | str = "learned", *,
        normalize: bool = True, reduction: str = "mean",
    ):  # fmt: skip
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = temperature if temperature == "learned" else positive("temperature", temperature)
        self.bias = bias if bias == "learned" else number("bias", bias)
        if self.temperature == "learned":
            self.t_prime = nn.Parameter(torch.tensor(math.log(10)))
        if self.bias == "learned":
            self.b = nn.Parameter(torch.tensor(-10.0))

    def contrast(self, pairs: Pairs) -> Terms:
        t: float | Tensor = self.t_prime.exp() if isinstance(self.temperature, str) else 1 / self.temperature
        b: float | Tensor = self.b if isinstance(self.bias, str) else self.bias
        links = pairs.one_way_links()
        attraction, repulsion = -logsigmoid(t * pairs.similarity(links) + b), pairs.link_softplus_sums(t, b, links)
        return Terms(attraction=pairs.sum_by_query(attraction, links), repulsion=pairs.sum_by_query(repulsion, links))
