"""V views, B images, P links of two views.  positive and negatives [V,B], similarity and negatives of links [P,B]."""

from __future__ import annotations

from torch import Tensor

from kontrast.kernels.row_loss import LSE, RowLoss
from kontrast.kernels.view_links import ALL, OTHER
from kontrast.objectives.arguments import Number, choice, positive
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs

UNBOUNDED = "without the positive in the denominator the loss falls without bound as tau shrinks"


@OBJECTIVES.register("dcl")
class DCL(Objective):
    r"""Decoupled contrastive loss: NT-Xent without the positive in the denominator (DCL, proposition 2).

        loss_i = -<z_i, z_i+>/tau + log sum_{j: other images} exp(<z_i, z_j>/tau)

    NT-Xent_i = softplus(DCL_i). The loss can be negative; its lower bound is -2/tau plus the log of the number of
    negatives. With a bank, the negatives are the rows of the bank. The paper's reduction is `sum`; the default is
    `mean`, so that a learning rate can be reused from NT-Xent.

    With `cross-view` negatives, `objective(images, texts)` is InfoLOOB across modalities, in both directions: each
    image is repelled from the texts of other images and each text from their images. Images with the same label are
    then no negatives of each other, and an anchor's only positives are the other views of its image.

    When to use it: instead of NT-Xent if the batch is small: it was better by 2.7 points at 32 images on CIFAR-10 here,
    and at 512 there was little between them. The loss falls without bound as the temperature shrinks, so the
    temperature can't be learned. Compare losses only at the same batch size.

    Reference: Yeh et al., Decoupled Contrastive Learning, ECCV 2022; Fürst et al., CLOOB: Modern Hopfield Networks with
    InfoLOOB Outperform CLIP, NeurIPS 2022.

    Args:
        temperature: tau, divides the similarities. Small values concentrate the repulsion on near negatives.
        negatives: `all` views of other images, or for each positive the same view of other images (`cross-view`).
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D], labels [B]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import DCL
        >>> DCL(temperature=0.5)(torch.eye(4), torch.eye(4))
        tensor(-0.2082)
    """

    paper = "DCL, proposition 2"
    equation = r"""
        \ell_i = -\frac{\langle z_i, z_i^+ \rangle}{\tau} + \log \sum_{j \neq i} e^{\langle z_i, z_j \rangle / \tau}
    """
    takes_bank = True
    takes_labels = True

    def __init__(
        self, temperature: Number = 0.1, negatives: str = "all", *, normalize: bool = True, reduction: str = "mean"
    ):
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature, not_learned=UNBOUNDED)
        self.negatives = choice("negatives", negatives, ("all", "cross-view"))

    def row_loss(self, images: int) -> RowLoss | None:
        a, kind = 1 / self.temperature, OTHER if self.negatives == "cross-view" else ALL
        return None if isinstance(a, Tensor) else RowLoss(kind, [a], LSE, pull=a)

    def contrast(self, pairs: Pairs) -> Terms:
        if self.negatives == "cross-view":
            repulsion = pairs.link_negatives(1 / self.temperature, pairs.links).lse
            attraction = (-1 / self.temperature) * pairs.similarity(pairs.links)
            return Terms(
                attraction=pairs.mean_over_positives(attraction), repulsion=pairs.mean_over_positives(repulsion)
            )
        attraction, repulsion = pairs.attraction_and_negatives(scale=1 / self.temperature)
        return Terms(attraction=attraction, repulsion=repulsion)
