"""V views, B images.  positive [V,B], the mean similarity to an anchor's positives; others [V,B]."""

from __future__ import annotations

from kontrast.objectives.arguments import positive
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("nt-xent")
class NTXent(Objective):
    r"""Normalised temperature-scaled cross entropy: find the positive among all other rows (SimCLR; GCL, equation 2).

        loss_i = -mean_{p: positives} <z_i, z_p>/tau + log sum_{k != i} exp(<z_i, z_k>/tau)

    With two views this is SimCLR's loss; with more views, or ids (labels), it is the outer form of SupCon. With keys
    the positives and negatives are keys, with a bank the negatives are the bank's. `reduction`: `mean` over anchors,
    `sum`, or `simclr_tf`, which adds the means of the views and so is V times the mean.

    Reference: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020; Khosla et
    al., Supervised Contrastive Learning, NeurIPS 2020.
    """

    paper = "GCL, equation 2"
    takes_bank = True
    takes_ids = True

    def __init__(self, temperature: float = 0.2, *, normalize: bool = True, reduction: str = "mean"):
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature)

    def contrast(self, pairs: Pairs) -> Terms:
        return Terms(
            attraction=-pairs.positive / self.temperature,
            repulsion=pairs.others(scale=1 / self.temperature),
        )
