"""V views, B images.  positive [V,B], the mean similarity to an anchor's positives; others [V,B]."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kontrast.kernels.row_loss import LSE, RowLoss
from kontrast.kernels.view_links import ALL
from kontrast.objectives.arguments import Number
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.learned_temperature import current, temperature_argument
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("nt-xent")
class NTXent(Objective):
    r"""Normalized temperature-scaled cross entropy: find the positive among all other rows (SimCLR; GCL, equation 2).

        loss_i = -mean_{p: positives} <z_i, z_p>/tau + log sum_{k != i} exp(<z_i, z_k>/tau)

    With two views this is SimCLR's loss; with more views or with labels it is the outer form of SupCon: call `loss(z,
    labels=y)`. With keys, positives and negatives are keys; with a bank, the negatives are the rows of the bank.

    When to use it: first, because it has one number to choose, needs nothing besides the batch, and is what other
    results are compared with. It wants large batches, because easy positives damp its gradient when negatives are few;
    below 256 images, take DCL. With labels it is SupCon.

    Reference: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020; Khosla et
    al., Supervised Contrastive Learning, NeurIPS 2020.

    Args:
        temperature: tau, divides the similarities. Small values concentrate the repulsion on near negatives. A tensor
            or parameter gets its gradient; "learned" makes it a parameter of the loss (its log, as in CLIP).
        initial_temperature: where a learned temperature starts. None: 0.2.
        temperature_bounds: the least and the largest learned temperature. None: 0.01 and 1.
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
    equation = r"""
        \ell_i = -\mathrm{mean}_p \frac{\langle z_i, z_p \rangle}{\tau}
            + \log \sum_{k \neq i} e^{\langle z_i, z_k \rangle / \tau}
    """
    takes_bank = True
    takes_labels = True

    def __init__(
        self, temperature: Number | str = 0.2, *, initial_temperature: float | None = None,
        temperature_bounds: Sequence[float] | None = None, normalize: bool = True, reduction: str = "mean",
    ):  # fmt: skip
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = temperature_argument(temperature, initial_temperature, temperature_bounds, default=0.2)
        self.initial_temperature, self.temperature_bounds = initial_temperature, temperature_bounds

    def row_loss(self, images: int) -> RowLoss | None:
        a = 1 / current(self.temperature)
        return None if isinstance(a, Tensor) else RowLoss(ALL, [a], LSE, pull=a, positive=True)

    def contrast(self, pairs: Pairs) -> Terms:
        attraction, repulsion = pairs.attraction_and_others(scale=1 / current(self.temperature))
        return Terms(attraction=attraction, repulsion=repulsion)
