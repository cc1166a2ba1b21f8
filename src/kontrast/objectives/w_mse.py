"""V query views, W key views, N images of all ranks, D width.  y [V,B,D] whitened features, positive [V,B]."""

from __future__ import annotations

from kontrast.objectives.arguments import fixed, switch, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.inputs import Inputs
from kontrast.objectives.pairs import Pairs
from kontrast.objectives.whitening import whiten_by_view, whiten_pairs


@OBJECTIVES.register("w-mse")
class WMSE(Objective):
    r"""Mean squared error of whitened features (W-MSE, equation 6).

        y = L^-1 (z - mu),  L L^T = Sigma,  of unit length;   loss = mean_i ||y_i - y_i'||^2

    Sigma is unbiased and has a relative ridge: (1 - ridge) Sigma + ridge tr(Sigma)/D I.

    When to use it: for the smallest possible method without negatives: a distance of whitened projections. It needs
    more images in a batch than features in a projection, so projections are narrow. Without scaling the whitened rows
    to length one it is SimTrace, up to constants.

    Reference: Ermolov et al., Whitening for Self-Supervised Representation Learning, ICML 2021.

    Args:
        ridge: regularizes Sigma, from 0 to 1.
        normalize: scale the whitened rows y to length one.
        pooled: whiten all views together. False, as the original: each view, over the images of all ranks.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import WMSE
        >>> WMSE()(torch.eye(4), -torch.eye(4))
        tensor(4.)
    """

    paper = "UniCLR, table 2 (W-MSE)"
    equation = r"""
        L = \mathrm{mean}_i \left\lVert \frac{y_i}{\lVert y_i \rVert}
            - \frac{y'_i}{\lVert y'_i \rVert} \right\rVert^2,
        y = L_\Sigma^{-1} (z - \mu), \; L_\Sigma L_\Sigma^\top = \Sigma
    """

    def __init__(self, ridge: float = 1e-3, *, normalize: bool = True, pooled: bool = False, reduction: str = "mean"):
        super().__init__(normalize=normalize, reduction=reduction)
        self.ridge = fixed("ridge", weight("ridge", ridge))
        self.pooled = switch("pooled", pooled)

    def pairs(self, inputs: Inputs) -> Pairs:
        pairs = Pairs(inputs, normalize=False)
        pairs = whiten_pairs(pairs, self.ridge, pooled=True) if self.pooled else whiten_by_view(pairs, self.ridge)
        if self.normalize:
            pairs.normalize(eps=1e-6)
        return pairs

    def contrast(self, pairs: Pairs) -> Terms:
        return Terms(attraction=pairs.sum_by_query(pairs.squared_distance(pairs.links), pairs.links))
