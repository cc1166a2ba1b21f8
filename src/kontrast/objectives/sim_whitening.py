"""N images of all ranks, D width.  z [V,B,D] and keys [W,B,D], of which each pair of views is whitened together."""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast.kernels.covariance import whiten
from kontrast.kernels.two_view_loss import computes, two_view_loss
from kontrast.objectives.arguments import Number, choice, fixed, switch, weight
from kontrast.objectives.base import OBJECTIVES
from kontrast.objectives.inputs import Inputs
from kontrast.objectives.pairs import Pairs
from kontrast.objectives.sim_affinity import SimAffinity
from kontrast.objectives.whitening import whiten_pairs


@OBJECTIVES.register("sim-whitening")
class SimWhitening(SimAffinity):
    r"""SimAffinity of whitened features (UniCLR, equations 2 and 6).

        y = Sigma^(-1/2) (z - mu), of unit length;   A = Y Y'^T / tau;   loss as SimAffinity's

    mu and Sigma are those of the 2N rows of the pair {Z, Z'}, as in equation 2, with a relative ridge: (1 - ridge)
    Sigma + ridge tr(Sigma)/D I. With keys, or with more than two views, each pair of views has its own; with `pooled`,
    all views and keys share one. `mocov3`, the released code, normalizes before whitening instead of after, uses Sigma
    + ridge I and divides A by N. The paper's temperature is 0.5 in table 1 and 1 in table 2.

    When to use it: to combine whitening with a contrastive loss, as UniCLR does. It needs more images in a batch than
    features in a projection. It was within a point of SimAffinity on CIFAR-10 here, and computes a matrix root in each
    step.

    Reference: Li et al., A Unified Framework for Contrastive Learning from a Perspective of Affinity Matrix, 2022.

    Args:
        temperature: tau, divides the similarities.
        symmetry_weight: gamma, weight of the penalty on the asymmetry of A, at least 0.
        ridge: regularizes Sigma, at least 0. None: 1e-3 for `paper`, 0.01 for `mocov3`.
        variant: `paper` or `mocov3`.
        pooled: take mu and Sigma over all views and keys, instead of over the two views of each pair.
        symmetric: without keys, take the mean of both directions.
        symmetry_on_scaled: penalize A as above. False: penalize Y Y'^T.
        normalize_by_n: divide the norm, which grows with the number N of images, by N.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import SimWhitening
        >>> SimWhitening()(torch.eye(4), torch.eye(4))
        tensor(0.1893)
    """

    paper = "UniCLR, equations 2 and 6"
    equation = r"""
        L = \mathrm{SimAffinity}\!\left( \frac{y}{\lVert y \rVert} \right), \quad y = \Sigma^{-1/2} (z - \mu)
    """
    takes_bank = False

    def __init__(
        self, temperature: Number = 0.5, symmetry_weight: Number = 0.01, ridge: float | None = None, *,
        variant: str = "paper", pooled: bool = False, symmetric: bool = False, symmetry_on_scaled: bool = True,
        normalize_by_n: bool = False,
    ):  # fmt: skip
        options = {"symmetry_on_scaled": symmetry_on_scaled, "normalize_by_n": normalize_by_n}
        super().__init__(temperature, symmetry_weight, symmetric=symmetric, **options)
        self.ridge = None if ridge is None else fixed("ridge", weight("ridge", ridge))
        self.variant = choice("variant", variant, ("paper", "mocov3"))
        self.pooled = switch("pooled", pooled)

    def fused_loss(self, z: Tensor, z2: Tensor | None) -> Tensor | None:
        row_loss, ridge = super().row_loss(z.shape[-2]), 1e-3 if self.ridge is None else self.ridge
        if row_loss is None or not computes(row_loss, z) or self.variant == "mocov3" or ridge > 1:
            return None
        rows = z if z2 is None else torch.stack([z, z2])
        white = whiten(rows.flatten(0, 1), ridge=ridge).view(rows.shape)
        return two_view_loss(white, None, row_loss._replace(shortest=1e-6))  # as in `pairs`

    def scale(self, pairs: Pairs) -> Number:
        return 1 / (self.temperature * (pairs.N if self.variant == "mocov3" else 1))

    def pairs(self, inputs: Inputs) -> Pairs:
        code = self.variant == "mocov3"
        ridge = self.ridge if self.ridge is not None else (0.01 if code else 1e-3)
        pairs = whiten_pairs(Pairs(inputs, normalize=code), ridge, absolute=code, pooled=self.pooled)
        if not code:
            # A row at the mean has no direction: under 1e-6 it counts as zero, other whitened rows are near sqrt(D).
            pairs.normalize(eps=1e-6)
        return pairs
