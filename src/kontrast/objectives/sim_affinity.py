"""N images of all ranks, P links of a query view with a key view.  similarity [P,B]; A [N,N] is never stored."""

from __future__ import annotations

from torch import Tensor

from kontrast.kernels.row_loss import LSE, RowLoss
from kontrast.kernels.view_links import LATER, OTHER
from kontrast.objectives.arguments import NT_XENT_ALONE, Number, is_zero, positive, switch, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("sim-affinity")
class SimAffinity(Objective):
    r"""Cross entropy over the rows of the affinity matrix, and a penalty on its asymmetry (UniCLR, equations 1 and 6).

        A = Z Z'^T / tau,   loss = mean_i [ -A_ii + log sum_j exp(A_ij) ] + gamma ||A - A^T||_F

    Without the penalty it is InfoNCE with the batch as keys, in one direction as in algorithm 1. Keys of several views
    give the mean of both directions, which the released code adds. With a bank, its rows are the negatives. With more
    than two views, the loss is the mean over pairs of views.

    When to use it: if you want InfoNCE in a batch with an affinity that is equal in both directions. The penalty on
    asymmetry sped up learning on CIFAR-10 here and helped more than the temperature did. Some seeds collapsed in the
    first epoch without a warm-up: use one.

    Reference: Li et al., A Unified Framework for Contrastive Learning from a Perspective of Affinity Matrix, 2022.

    Args:
        temperature: tau, divides the similarities.
        symmetry_weight: gamma, at least 0.
        symmetric: without keys, take the mean of both directions.
        symmetry_on_scaled: penalize A as above. False: penalize Z Z'^T.
        normalize_by_n: divide the norm, which grows with the number N of images, by N.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import SimAffinity
        >>> SimAffinity(temperature=0.5)(torch.eye(4), torch.eye(4))
        tensor(0.3408)
    """

    paper = "UniCLR, equations 1 and 6"
    equation = r"""
        L = \mathrm{mean}_i \left[ -A_{ii} + \log \sum_j e^{A_{ij}} \right] + \gamma \lVert A
            - A^\top \rVert_F, \quad A = Z Z'^\top / \tau
    """
    takes_bank = True

    def __init__(
        self, temperature: Number = 0.5, symmetry_weight: Number = 0.01, *,
        symmetric: bool = False, symmetry_on_scaled: bool = True, normalize_by_n: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.temperature = positive("temperature", temperature, not_learned=NT_XENT_ALONE)
        self.symmetry_weight = weight("symmetry_weight", symmetry_weight)
        self.symmetric = switch("symmetric", symmetric)
        self.symmetry_on_scaled = switch("symmetry_on_scaled", symmetry_on_scaled)
        self.normalize_by_n = switch("normalize_by_n", normalize_by_n)

    def row_loss(self, images: int) -> RowLoss | None:
        a, weight, kind = 1 / self.temperature, self.symmetry_weight, OTHER if self.symmetric else LATER
        if isinstance(a, Tensor) or isinstance(weight, Tensor):
            return None
        weight *= (a if self.symmetry_on_scaled else 1.0) / (images if self.normalize_by_n else 1)
        return RowLoss(kind, [a], LSE, pull=a, positive=True, asymmetry=weight)

    def scale(self, pairs: Pairs) -> Number:
        return 1 / self.temperature

    def contrast(self, pairs: Pairs) -> Terms:
        links, scale = pairs.one_way_links(self.symmetric), self.scale(pairs)
        penalized = not is_zero(self.symmetry_weight)
        asymmetry = pairs.asymmetries(pairs.one_way_links()).mean() if penalized else None
        attraction, repulsion = pairs.attraction_and_others(scale, links)
        terms = Terms(attraction=pairs.sum_by_query(attraction, links), repulsion=pairs.sum_by_query(repulsion, links))
        if asymmetry is not None:
            factor = (scale if self.symmetry_on_scaled else 1.0) / (pairs.N if self.normalize_by_n else 1)
            terms["symmetry"] = self.symmetry_weight * factor * asymmetry
        return terms
