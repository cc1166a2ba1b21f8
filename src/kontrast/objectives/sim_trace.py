"""V query views, N images of all ranks, D width, P links of views.  y [B,D] whitened features, similarity [P,B]."""

from __future__ import annotations

from kontrast.objectives.arguments import choice, fixed, switch, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.inputs import Inputs
from kontrast.objectives.pairs import Pairs
from kontrast.objectives.whitening import whiten_pairs, whitened_count


@OBJECTIVES.register("sim-trace")
class SimTrace(Objective):
    r"""Maximize the trace of the whitened affinity matrix (UniCLR, equation 3).

        loss = -1/N trace( (Z - mu) Sigma^-1 (Z' - mu)^T ) = -1/N sum_i <y_i, y_i'>

    mu and Sigma (unbiased) are those of the 2N rows of the pair {Z, Z'}, so a collapse gains nothing: the loss is -D/2
    (2N-1)/N plus half the whitened mean squared error. With keys, or with more than two views, each pair of views has
    its own; with `pooled`, all views and keys share one. The paper and its released code differ:

        variant   rows                 mu and Sigma         ridge
        paper     as they are, no L2   with gradient        relative: (1 - ridge) Sigma + ridge tr(Sigma)/D I
        mocov3    of unit length       constants            absolute: Sigma + ridge I

    `auto` trains with a teacher (keys) as the code does, and without one as the paper says. For the paper's form with a
    teacher give `variant="paper"`.

    When to use it: if you want no negatives, no temperature and no predictor: whitening alone prevents collapse. It
    needs more images in a batch than features in a projection, since it inverts their covariance. It was about a point
    behind SimAffinity on CIFAR-10 here.

    Reference: Li et al., A Unified Framework for Contrastive Learning from a Perspective of Affinity Matrix, 2022.

    Args:
        ridge: regularizes Sigma, at least 0. None: 1e-3 for `paper`, 0.01 for `mocov3`.
        variant: `paper`, `mocov3`, or `auto`: mocov3 with keys and paper without.
        pooled: take mu and Sigma over all views and keys, instead of over the two views of each pair.
        scaling: `mean` as above, or `sum`, the paper's text: Sigma a sum and no 1/N, so that |loss| <= D/2.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import SimTrace
        >>> SimTrace()(torch.eye(4), torch.eye(4))
        tensor(-2.6257)
    """

    paper = "UniCLR, equation 3"
    equation = r"L = -\frac{1}{N} \mathrm{trace} \left( (Z - \mu)\, \Sigma^{-1} (Z' - \mu)^\top \right)"

    def __init__(
        self, ridge: float | None = None, *, variant: str = "auto", pooled: bool = False, scaling: str = "mean"
    ):  # fmt: skip
        super().__init__(normalize=False)
        self.ridge = None if ridge is None else fixed("ridge", weight("ridge", ridge))
        self.variant = choice("variant", variant, ("auto", "paper", "mocov3"))
        self.pooled = switch("pooled", pooled)
        self.scaling = choice("scaling", scaling, ("mean", "sum"))

    def pairs(self, inputs: Inputs) -> Pairs:
        code = self.variant == "mocov3" or (self.variant == "auto" and inputs.keys is not None)
        ridge = self.ridge if self.ridge is not None else (0.01 if code else 1e-3)
        pairs = Pairs(inputs, normalize=code)
        return whiten_pairs(pairs, ridge, absolute=code, detach=code, pooled=self.pooled)

    def contrast(self, pairs: Pairs) -> Terms:
        links = pairs.one_way_links()
        factor = 1.0 if self.scaling == "mean" else pairs.N / (whitened_count(pairs) - 1)
        return Terms(attraction=-factor * pairs.sum_by_query(pairs.similarity(links), links))
