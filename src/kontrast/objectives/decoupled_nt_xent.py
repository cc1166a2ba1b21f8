"""V views, B images, D width.  positive [V,B], the mean similarity to an anchor's positives; others [V,B]."""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast.kernels.row_loss import LSE, RowLoss
from kontrast.kernels.view_links import ALL
from kontrast.objectives.arguments import Number, choice, positive, switch, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("decoupled-nt-xent")
class DecoupledNTXent(Objective):
    r"""NT-Xent with separate weights of attraction and distribution (GCL, equation 4).

        loss_i = -<z_i, z_i+> + lambda log sum_{k != i} exp(<z_i, z_k>/tau)

    Unlike DCL, it keeps the positive in the sum. At lambda = tau it is tau times NT-Xent. The paper's lambda = 0.1
    belongs to its code, whose attraction is the mean over dimensions, (1 - <z_i, z_i+>)/D: use `align_reduction="mean"`
    with it. With equation 4 as written (`"sum"`) such a small weight lets the representation collapse; the equivalent
    there is 0.1 D.

    When to use it: to study how much weight the distribution of the projections should have, apart from the
    temperature. For training it is NT-Xent with one more number to choose. Check which scale a published lambda belongs
    to before you copy it.

    Reference: Chen, Luo and Li, Intriguing Properties of Contrastive Losses, NeurIPS 2021.

    Args:
        temperature: tau, divides the similarities.
        distribution_weight: lambda, at least 0.
        align_reduction: attraction as written (`sum`) or its mean over dimensions (`mean`).
        loss_scale: multiplies the loss. The paper uses 1000 with `mean`, which is small for unit z.
        include_self: count k = i too, as that code does before subtracting lambda log D. Only for z alone.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D], labels [B]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import DecoupledNTXent
        >>> DecoupledNTXent()(torch.eye(4), torch.eye(4))
        tensor(-0.7835)
    """

    paper = "GCL, equation 4"
    equation = r"""
        \ell_i = -\langle z_i, z_i^+ \rangle + \lambda \log \sum_{k \neq i} e^{\langle z_i, z_k \rangle / \tau}
    """
    takes_bank = True
    takes_labels = True

    def __init__(
        self, temperature: Number = 1.0, distribution_weight: Number = 0.1, *, align_reduction: str = "sum",
        loss_scale: Number = 1.0, include_self: bool = False, normalize: bool = True, reduction: str = "mean",
    ):  # fmt: skip
        super().__init__(normalize=normalize, reduction=reduction)
        alone = "only the repulsion depends on tau, so nothing keeps it in proportion to the attraction"
        self.temperature = positive("temperature", temperature, not_learned=alone)
        self.distribution_weight = weight("distribution_weight", distribution_weight)
        self.loss_scale = positive("loss_scale", loss_scale)
        self.align_reduction = choice("align_reduction", align_reduction, ("sum", "mean"))
        self.include_self = switch("include_self", include_self)

    def row_loss(self, images: int) -> RowLoss | None:
        a, pull, push = 1 / self.temperature, self.loss_scale, self.loss_scale * self.distribution_weight
        if isinstance(a, Tensor) or isinstance(pull, Tensor) or isinstance(push, Tensor):
            return None
        if self.include_self or self.align_reduction == "mean" or push == 0:
            return None
        return RowLoss(ALL, [a], LSE, pull=pull, push=push, positive=True)

    def contrast(self, pairs: Pairs) -> Terms:
        attraction = -pairs.positive if self.align_reduction == "sum" else (1 - pairs.positive) / pairs.D
        others = pairs.others(scale=1 / self.temperature)
        if self.include_self:
            if pairs.teacher or pairs.bank is not None:
                raise ValueError("include_self counts z with itself: give z alone, without keys or a bank")
            others = torch.logaddexp(others, pairs.z.square().sum(-1) / self.temperature)
        return Terms(
            attraction=self.loss_scale * attraction,
            repulsion=self.loss_scale * self.distribution_weight * others,
        )
