"""V query views, W key views, B images.  positive [V,B], the mean similarity to an anchor's positives."""

from __future__ import annotations

from kontrast.objectives.arguments import choice
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("alignment")
class Alignment(Objective):
    r"""Attraction alone: BYOL and SimSiam, with a predictor and keys without gradient.

        loss_i = mean_{p: positives} ||z_i - z_p||^2 = 2 - 2 mean_p <z_i, z_p>

    Without keys nothing prevents the representation from collapsing; the keys of BYOL and SimSiam do.

    When to use it: with a predictor and keys without gradient, as the recipes of BYOL and SimSiam do, if you want no
    negatives at all. It does not need large batches, but watch the effective rank: alone it collapses. Learning rate,
    momentum and weight decay matter more than for contrastive losses.

    Reference: Grill et al., Bootstrap Your Own Latent, NeurIPS 2020; Chen and He, Exploring Simple Siamese
    Representation Learning, CVPR 2021.

    Args:
        form: `squared-distance` as above (BYOL), or `negative-cosine`, -mean_p <z_i, z_p> (SimSiam).
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import Alignment
        >>> Alignment()(torch.eye(4), -torch.eye(4))
        tensor(4.)
    """

    paper = "UniCLR, table 2 (BYOL, SimSiam)"
    equation = r"""
        \ell_i = \mathrm{mean}_p \lVert z_i - z_p \rVert^2 = 2 - 2\, \mathrm{mean}_p \langle z_i, z_p \rangle
    """

    def __init__(self, form: str = "squared-distance", *, reduction: str = "mean"):
        super().__init__(reduction=reduction)
        self.form = choice("form", form, ("squared-distance", "negative-cosine"))

    def contrast(self, pairs: Pairs) -> Terms:
        distance = 2 - 2 * pairs.positive
        return Terms(attraction=distance if self.form == "squared-distance" else distance / 2 - 1)
