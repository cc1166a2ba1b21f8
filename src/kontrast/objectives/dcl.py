"""V views, B images.  positive [V,B], the mean similarity to an anchor's positives; negatives [V,B]."""

from __future__ import annotations

from kontrast.objectives.arguments import positive
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("dcl")
class DCL(Objective):
    r"""Decoupled contrastive loss: NT-Xent with the positive left out of the denominator (DCL, proposition 2).

        loss_i = -<z_i, z_i+>/tau + log sum_{j: other images} exp(<z_i, z_j>/tau)

    It can be negative: its bound is -2/tau + log of the number of negatives, and NT-Xent_i = softplus(DCL_i). With a
    bank the negatives are the bank's alone. `reduction`: `mean` over anchors (the default, so that a learning rate
    carries over from NT-Xent), the paper's `sum`, or `simclr_tf`, which adds the means of the views.

    Reference: Yeh et al., Decoupled Contrastive Learning, ECCV 2022.
    """

    paper = "DCL, proposition 2"
    takes_bank = True
    takes_ids = True

    def __init__(self, temperature: float = 0.1, *, normalize: bool = True, reduction: str = "mean"):
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature)

    def contrast(self, pairs: Pairs) -> Terms:
        rows = pairs.negatives(scale=1 / self.temperature)
        return Terms(attraction=-pairs.positive / self.temperature, repulsion=rows.lse)
