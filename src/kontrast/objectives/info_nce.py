"""V query views, W key views, B images, P links of a query view with a key view.  similarity and negatives [P,B]."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kontrast.kernels.row_loss import LSE, RowLoss
from kontrast.kernels.view_links import LATER, OTHER
from kontrast.objectives.arguments import Number, positive, switch
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.learned_temperature import current, temperature_argument
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("info-nce")
class InfoNCE(Objective):
    r"""Find the key of a query among the negatives: MoCo with a bank, MoCo v3 with keys alone (JCL, equation 1).

        loss_i = -<q_i, k_i>/tau + log( exp(<q_i, k_i>/tau) + sum_j exp(<q_i, n_j>/tau) )

    The negatives n are the bank, or without one the same key view of the other images. With several positive keys the
    loss is the mean of theirs. Without keys, the earlier view of each pair of views is the query and the later one the
    keys, both with gradient. Symmetric with two views, `objective(images, texts)` is CLIP's loss. Images with the same
    label are no negatives of each other, for example two captions of one image.

    When to use it: with a momentum teacher and a bank (MoCo), with a teacher alone (MoCo v3), or for images and texts
    (CLIP). With a bank the number of negatives does not depend on the batch, so it trains with small batches. With
    neither, NT-Xent uses each batch better, because it also repels within a view.

    Reference: van den Oord et al., Representation Learning with Contrastive Predictive Coding, 2018; He et al.,
    Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020; Radford et al., Learning Transferable
    Visual Models From Natural Language Supervision, ICML 2021; Chen, Xie and He, An Empirical Study of Training
    Self-Supervised Vision Transformers, ICCV 2021.

    Args:
        temperature: tau, divides the similarities. A tensor or parameter gets its gradient; "learned" makes it a
            parameter of the loss (its log, as in CLIP).
        loss_scale: multiplies the loss; "2tau" is twice the temperature. MoCo v3's loss has keys, loss_scale "2tau" and
            reduction `simclr_tf`, and no bank.
        symmetric: without keys, use both directions of each pair of views.
        initial_temperature: where a learned temperature starts. None: 0.2.
        temperature_bounds: the least and the largest learned temperature. None: 0.01 and 1.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D], labels [B]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import InfoNCE
        >>> InfoNCE(temperature=0.5)(torch.eye(4), torch.eye(4))
        tensor(0.3408)
    """

    paper = "JCL, equation 1"
    equation = r"""
        \ell_i = -\frac{\langle q_i, k_i \rangle}{\tau} + \log \left( e^{\langle q_i, k_i \rangle / \tau}
            + \sum_j e^{\langle q_i, n_j \rangle / \tau} \right)
    """
    takes_bank = True
    takes_labels = True

    def __init__(
        self, temperature: Number | str = 0.2, *, loss_scale: Number | str = 1.0, symmetric: bool = False,
        initial_temperature: float | None = None, temperature_bounds: Sequence[float] | None = None,
        normalize: bool = True, reduction: str = "mean",
    ):  # fmt: skip
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = temperature_argument(temperature, initial_temperature, temperature_bounds, default=0.2)
        self.initial_temperature, self.temperature_bounds = initial_temperature, temperature_bounds
        known = isinstance(loss_scale, str) and loss_scale == "2tau"
        self.loss_scale = loss_scale if known else positive("loss_scale", loss_scale, not_learned="it would run to 0")
        self.symmetric = switch("symmetric", symmetric)

    def row_loss(self, images: int) -> RowLoss | None:
        a, kind = 1 / current(self.temperature), OTHER if self.symmetric else LATER
        if isinstance(a, Tensor) or isinstance(self.loss_scale, str | Tensor) or self.loss_scale != 1:
            return None
        return RowLoss(kind, [a], LSE, pull=a, positive=True)

    def contrast(self, pairs: Pairs) -> Terms:
        links, temperature = pairs.one_way_links(self.symmetric), current(self.temperature)
        attraction, repulsion = pairs.attraction_and_others(1 / temperature, links)
        terms = Terms(attraction=pairs.sum_by_query(attraction, links), repulsion=pairs.sum_by_query(repulsion, links))
        scale = 2 * temperature if isinstance(self.loss_scale, str) else self.loss_scale
        if isinstance(scale, Tensor) or scale != 1:
            terms.update({name: scale * rows for name, rows in terms.items()})
        return terms
