"""V query views, W key views, N images of all ranks, D width.  y [V,B,D] whitened features, positive [V,B]."""

from __future__ import annotations

from kontrast.objectives.arguments import switch, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.inputs import Inputs
from kontrast.objectives.pairs import Pairs
from kontrast.objectives.positives import unit


@OBJECTIVES.register("w-mse")
class WMSE(Objective):
    r"""Mean squared error of whitened features (W-MSE, equation 6).

        y = L^-1 (z - mu),  L L^T = Sigma,  of unit length;   loss = mean_i ||y_i - y_i'||^2

    Each view is whitened by itself, over the images of all ranks, as in the original; `pooled` whitens all views
    together. `normalize` false leaves the length of y. Sigma (unbiased) has a relative ridge.

    Reference: Ermolov et al., Whitening for Self-Supervised Representation Learning, ICML 2021.
    """

    paper = "UniCLR, table 2 (W-MSE)"

    def __init__(self, ridge: float = 1e-3, *, normalize: bool = True, pooled: bool = False, reduction: str = "mean"):
        super().__init__(normalize=normalize, reduction=reduction)
        self.ridge = weight("ridge", ridge)
        self.pooled = switch("pooled", pooled)

    def pairs(self, inputs: Inputs) -> Pairs:
        pairs = Pairs(inputs, normalize=False)
        pairs = pairs.whitened(self.ridge) if self.pooled else pairs.whitened_by_view(self.ridge)
        if self.normalize:
            pairs.z, pairs.k = unit(pairs.z, eps=1e-6), unit(pairs.k, eps=1e-6)
        return pairs

    def contrast(self, pairs: Pairs) -> Terms:
        return Terms(attraction=pairs.by_anchor(pairs.squared_distance(pairs.links), pairs.links))
