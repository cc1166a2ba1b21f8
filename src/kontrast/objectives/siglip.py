"""V query views, B images, P links of a query view with a key view.  similarity and sums of softplus [P,B]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from kontrast.objectives.arguments import Number, number
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.learned_temperature import current, temperature_argument
from kontrast.objectives.pairs import Pairs

BOUNDS = (0.001, 10.0)


@OBJECTIVES.register("siglip")
class SigLIP(Objective):
    r"""Sigmoid loss of images and texts: is this pair of an image and a text a match, for every pair (SigLIP).

        loss_i = softplus(-(t s_ii + b)) + sum_{j: other images} softplus(t s_ij + b),   s_ij = <z_i, z'_j>,   t = 1/tau

    Call `objective(images, texts)`. The loss is the mean over images, not over pairs. With more views, each pair of
    views counts once; with keys, every key view of an image matches. Images with the same label are no negatives of
    each other, for example two captions of one image.

    When to use it: for images and texts, if batches are small or spread over many devices: each pair is judged by
    itself, so no pair waits for the sum over a row. The bias b has to start far below 0, because nearly all pairs are
    negatives. For one kind of input, NT-Xent is the usual choice.

    Reference: Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023.

    Args:
        temperature: tau, divides the similarities. A tensor or parameter gets its gradient; "learned" makes t' = log t
            a parameter of the loss.
        bias: b, any number. "learned" makes it a parameter that starts at -10, so that few pairs match at first.
        initial_temperature: where a learned temperature starts. None: 0.1.
        temperature_bounds: the least and the largest learned temperature. None: 0.001 and 10.
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
    equation = r"""
        \ell_i = \mathrm{softplus}\!\left( -(t s_{ii} + b) \right)
            + \sum_{j \neq i} \mathrm{softplus}\!\left( t s_{ij} + b \right), \quad t = 1/\tau
    """
    takes_labels = True

    def __init__(
        self, temperature: Number | str = "learned", bias: Number | str = "learned", *,
        initial_temperature: float | None = None, temperature_bounds: Sequence[float] | None = None,
        normalize: bool = True, reduction: str = "mean",
    ):  # fmt: skip
        super().__init__(normalize=normalize, reduction=reduction)
        learned = isinstance(temperature, str) and temperature == "learned"
        bounds = BOUNDS if temperature_bounds is None and learned else temperature_bounds
        self.temperature = temperature_argument(temperature, initial_temperature, bounds, default=0.1)
        self.initial_temperature, self.temperature_bounds = initial_temperature, temperature_bounds
        self.bias: Number | str = "learned"
        if isinstance(bias, str) and bias == "learned":
            self.b = nn.Parameter(torch.tensor(-10.0))
        else:
            self.bias = number("bias", bias)

    def contrast(self, pairs: Pairs) -> Terms:
        t, links = 1 / current(self.temperature), pairs.one_way_links()
        b = self.b if isinstance(self.bias, str) else self.bias
        attraction, repulsion = -logsigmoid(t * pairs.similarity(links) + b), pairs.link_softplus_sums(t, b, links)
        return Terms(attraction=pairs.sum_by_query(attraction, links), repulsion=pairs.sum_by_query(repulsion, links))
