"""V views, B images, D width.  positive [V,B], the mean similarity to an anchor's positives; others [V,B]."""

from __future__ import annotations

import torch

from kontrast.objectives.arguments import choice, positive, switch, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("decoupled-nt-xent")
class DecoupledNTXent(Objective):
    r"""NT-Xent whose two uses of the temperature are taken apart (GCL, equation 4); not DCL: the positive stays below.

        loss_i = -<z_i, z_i+> + lambda log sum_{k != i} exp(<z_i, z_k>/tau)

    At lambda = tau it is tau times NT-Xent. The paper's lambda = 0.1 goes with its code, whose attraction is the mean
    over dimensions, (1 - <z_i, z_i+>)/D: that is `align_reduction="mean"`. With equation 4 as written (`"sum"`) such a
    weight lets the representation collapse; 0.1 D is its equal there. `loss_scale` multiplies all; the paper takes 1000
    where attraction is that mean, which is small for unit z. `include_self` counts k = i below too, as that code does,
    which then subtracts the constant lambda log D; z alone has such a pair, keys and banks have none.

    Reference: Chen, Luo and Li, Intriguing Properties of Contrastive Losses, NeurIPS 2021.
    """

    paper = "GCL, equation 4"
    takes_bank = True
    takes_ids = True

    def __init__(
        self, temperature: float = 1.0, distribution_weight: float = 0.1, *, align_reduction: str = "sum",
        loss_scale: float = 1.0, include_self: bool = False, normalize: bool = True, reduction: str = "mean",
    ):  # fmt: skip
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature)
        self.distribution_weight = weight("distribution_weight", distribution_weight)
        self.loss_scale = positive("loss_scale", loss_scale)
        self.align_reduction = choice("align_reduction", align_reduction, ("sum", "mean"))
        self.include_self = switch("include_self", include_self)

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
