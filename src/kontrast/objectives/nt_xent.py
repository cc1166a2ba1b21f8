"""V views, B images.  positive [V,B], the mean similarity to an anchor's positives; others [V,B]."""

from __future__ import annotations

from kontrast.objectives.arguments import positive
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("nt-xent")
class NTXent(Objective):
    r"""Normalized temperature-scaled cross entropy: find the positive among all other rows (SimCLR; GCL, equation 2).

        loss_i = -mean_{p: positives} <z_i, z_p>/tau + log sum_{k != i} exp(<z_i, z_k>/tau)

    With two views this is SimCLR's loss; with more views or with labels it is the outer form of SupCon: call `loss(z,
    labels=y)`. With keys, positives and negatives are keys; with a bank, the negatives are the rows of the bank.

    Reference: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020; Khosla et
    al., Supervised Contrastive Learning, NeurIPS 2020.

    Args:
        temperature: tau, divides the similarities. Small values concentrate the repulsion on near negatives.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D], labels [B]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import NTXent
        >>> NTXent(temperature=0.5)(torch.eye(4), torch.eye(4))
        tensor(0.5944)
    """

    paper = "GCL, equation 2"
    takes_bank = True
    takes_labels = True

    def __init__(self, temperature: float = 0.2, *, normalize: bool = True, reduction: str = "mean"):
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature)

    def contrast(self, pairs: Pairs) -> Terms:
        repulsion = pairs.others(scale=1 / self.temperature)
        return Terms(attraction=(-1 / self.temperature) * pairs.positive, repulsion=repulsion)
