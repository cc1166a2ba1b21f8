"""V views (z, then keys), B images, N of all ranks, D width, P pairs of views.  x, y [V,B,D], C [P,1,D] or [P,B]."""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.float64 import where_float64_is
from kontrast.kernels.covariance import inverse_root, standardize
from kontrast.kernels.view_links import Link
from kontrast.objectives.arguments import choice, fixed, positive, switch
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.link_rows import stack
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("zero-cl")
class ZeroCL(Objective):
    r"""Features, and images, of two views that agree after whitening; there are no negatives (Zero-CL).

        FCL  = sum_d (1 - C_dd)^2,    C = Y1^T Y2 / N,   Y = X (X^T X/N + ridge I)^(-1/2),   X: columns standardized
        ICL  = sum_i (1 - C_ii)^2,    the same for the transposed Z, whose N columns are standardized over D
        loss = FCL + ICL

    Each view is whitened by itself over the images of all ranks. (The released code divides by N - 1 in Y and by N in
    C, so that equal views don't reach 0, and averages ICL over unrelated images of the ranks.) Whitening needs more
    images than features in FCL, and more features than images in ICL: a view of rank r costs at least D (1 - r/D)^2.
    With more than two views, the loss is the mean over pairs of views.

    Terms: attraction is the loss without whitening, what X1 and X2 lack in correlation. Repulsion is what whitening
    adds to it: 0 for uncorrelated features, and D (1 - 1/D)^2 in FCL if equal views have collapsed to a line.

    Reference: Zhang et al., Zero-CL: Instance and Feature Decorrelation for Negative-Free Symmetric Contrastive
    Learning, ICLR 2022.

    Args:
        mode: `both`, `features` for FCL alone, as the authors train ImageNet, or `instances` for ICL alone.
        ridge: added to the eigenvalues of the correlation matrix, above 0.
        detach: treat the whitening matrix as constant, like the authors.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import ZeroCL
        >>> ZeroCL("features")(torch.eye(4), -torch.eye(4))  # C_dd is -3/4 before the ridge
        tensor(12.1720)
    """

    paper = "UniCLR, table 2 (Zero-CL)"

    def __init__(self, mode: str = "both", ridge: float = 0.01, *, detach: bool = True):
        super().__init__(normalize=False)
        self.mode = choice("mode", mode, ("both", "features", "instances"))
        self.ridge = fixed("ridge", positive("ridge", ridge))
        self.detach = switch("detach", detach)

    def contrast(self, pairs: Pairs) -> Terms:
        views, shift = (torch.cat([pairs.z, pairs.k]), pairs.V) if pairs.teacher else (pairs.z, 0)
        links = [(v, w + shift) for v, w in pairs.one_way_links()]
        halves = [self.features] * (self.mode != "instances") + [self.instances] * (self.mode != "features")
        found = torch.stack([half(views, links, pairs) for half in halves]).sum(0) / len(links)
        plain, whitened = found.to(pairs.z).unbind()
        return Terms(attraction=plain, repulsion=whitened - plain)

    def features(self, views: Tensor, links: list[Link], pairs: Pairs) -> Tensor:
        """Return the sums of (1 - C_dd)^2 over all pairs of views, without and with whitening: [2]."""
        x = standardize(where_float64_is(views).double(), count=pairs.N, total=distributed.total)
        fixed_x = x.detach() if self.detach else x
        y = x @ inverse_root(distributed.total(fixed_x.mT @ fixed_x) / pairs.N, self.ridge)
        products = torch.cat([multiply(rows, links).sum(1, keepdim=True) for rows in (x, y)])
        C = distributed.total(products) / pairs.N
        return (1 - C).square().view(2, -1).sum(1)

    def instances(self, views: Tensor, links: list[Link], pairs: Pairs) -> Tensor:
        """Return the sums of (1 - C_ii)^2 over all pairs of views and images, without and with whitening: [2]."""
        everyone = standardize(where_float64_is(distributed.gather(views, dim=1)).double().mT).mT
        fixed_x = everyone.detach() if self.detach else everyone
        own = slice(distributed.rank() * pairs.B, (distributed.rank() + 1) * pairs.B)
        y = inverse_root(fixed_x @ fixed_x.mT / pairs.D, self.ridge)[:, own] @ everyone
        C = torch.cat([multiply(rows, links).sum(2) for rows in (everyone[:, own], y)]) / pairs.D
        return distributed.total((1 - C).square().view(2, -1).sum(1))


def multiply(rows: Tensor, links: list[Link]) -> Tensor:
    """Return the products of the features of two views, for each pair of views: [P,B,D]."""
    views = rows.unbind()  # once, because each index would have a gradient of the size of all rows
    return stack([views[v] * views[w] for v, w in links])
