"""V query views, B images, M' keys of a query.  logits [B,M'], mean and variance over them [V,B]."""

from __future__ import annotations

import torch

from kontrast.objectives.arguments import NT_XENT_ALONE, Number, fixed, positive, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.inputs import Inputs
from kontrast.objectives.pairs import Pairs
from kontrast.objectives.scheduled_number import on_device, scheduled_number


@OBJECTIVES.register("jcl")
class JCL(Objective):
    r"""Joint contrastive learning: infinitely many positive keys from a Gaussian fitted to M' keys (JCL, equation 8).

        loss_i = -q mu/tau + log( exp(q mu/tau + lambda/(2 tau^2) q^T Sigma q) + sum_j exp(q n_j/tau) )

    mu and Sigma (biased) are the mean and covariance of the keys of the image, so the first exponent is mean l +
    lambda/2 var l with l_m = q k_m/tau. Only q gets a gradient. The negatives are the bank, which holds means mu as
    they are, or without one the means of the other images. Without keys, the first view is the query and the other
    views are its keys.

    When to use it: in place of InfoNCE with a bank if you can afford several keys per image: five here. The covariance
    needs at least two keys. In our runs it was near MoCo v2 at its best temperature, and covariance weights up to 4
    made little difference.

    Reference: Cai et al., Joint Contrastive Learning with Infinite Possibilities, NeurIPS 2020.

    Args:
        temperature: tau, divides the similarities.
        covariance_weight: lambda, at least 0. It may be changed during training, also in a captured graph.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import JCL
        >>> JCL(covariance_weight=4.0)(torch.eye(4), torch.eye(4))
        tensor(0.0200)
    """

    paper = "JCL, equation 8"
    equation = r"""
        \ell_i = -\frac{q^\top \mu}{\tau} + \log \left( e^{q^\top \mu / \tau
            + \frac{\lambda}{2 \tau^2} q^\top \Sigma q} + \sum_j e^{q^\top n_j / \tau} \right)
    """
    takes_bank = True
    covariance_weight = scheduled_number("covariance_weight", weight)

    def __init__(self, temperature: Number = 0.2, covariance_weight: float = 4.0, *,
                 normalize: bool = True, reduction: str = "mean"):  # fmt: skip
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature, not_learned=NT_XENT_ALONE)
        self.covariance_weight = fixed("covariance_weight", weight("covariance_weight", covariance_weight))

    def pairs(self, inputs: Inputs) -> Pairs:
        if inputs.keys is None:
            inputs = inputs._replace(z=inputs.z[:1], keys=inputs.z[1:].detach())
        return super().pairs(inputs)

    def contrast(self, pairs: Pairs) -> Terms:
        mean = pairs.reduce_positives(lambda s: s.mean(-1)) / self.temperature
        half = on_device(self, "covariance_weight") / (2 * self.temperature**2)
        variance = half * pairs.reduce_positives(lambda s: s.var(-1, correction=0))
        negatives = pairs.mean_key_negatives(1 / self.temperature)
        return Terms(attraction=-mean, repulsion=torch.logaddexp(negatives, mean + variance))
