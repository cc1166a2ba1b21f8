"""V views, W assigning views, B images, M rows of a queue, K prototypes, D width.  keys [W,B,D], queues [W,M,D]."""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels.row_statistics import refuse as refuse_tensor
from kontrast.kernels.sinkhorn import sinkhorn_potentials
from kontrast.objectives.arguments import NT_XENT_ALONE, Number, fixed, positive, refuse, whole
from kontrast.objectives.base import OBJECTIVES
from kontrast.objectives.pairs import Pairs
from kontrast.objectives.prototype_objective import Assignment, PrototypeObjective


@OBJECTIVES.register("swav")
class SwAV(PrototypeObjective):
    r"""Swapped assignments: each view predicts to which prototypes another view is assigned (SwAV, equation 2).

        loss_i = -<z_i, sum_k q_k c_k>/tau + log sum_k exp(<z_i, c_k>/tau)
        q = Sinkhorn(<z', c_k>/epsilon) over the images of the batch

    z' is another view of the image, and its assignment q uses all prototypes nearly alike, which prevents collapse. The
    loss is the mean over pairs of an assigning view and a view that predicts it. With `global_views`, only those
    assign, and local crops predict them. q has no gradient; with keys, q is that of a teacher's projections. Rows of
    the bank, one queue per assigning view, are assigned together with the batch if no row of their queue is zero: a
    queue that is still being filled is ignored. On several ranks the images of all ranks are assigned together, and the
    bank, the same on all ranks, counts once.

    When to use it: with multi-crop, where local crops are cheap, and at batches of a few hundred images or with a
    queue. It needs prototypes, and the number of them is a few times the number of classes that you expect. The recipes
    freeze them at the start.

    Reference: Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster Assignments, NeurIPS 2020.

    Args:
        temperature: tau, divides the similarities to the prototypes in the prediction.
        epsilon: divides them in the assignment; smaller values make it sharper. If the loss is stuck at log K, try
            0.03.
        iterations: iterations of Sinkhorn's algorithm, at least 1.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], prototypes [K,D], keys [W,B,D], bank [W,M,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import SwAV
        >>> SwAV(temperature=0.5)(torch.eye(4), torch.eye(4), prototypes=torch.eye(4))
        tensor(0.3408)
    """

    paper = "SwAV, equation 2"
    equation = r"""
        \ell_i = -\frac{1}{\tau} \langle z_i, \sum_k q_k c_k \rangle
            + \log \sum_k e^{\langle z_i, c_k \rangle / \tau},
        q = \mathrm{Sinkhorn}\!\left( \langle z', c_k \rangle / \varepsilon \right)
    """
    takes_bank = True
    bank_per_view = True

    def __init__(self, temperature: Number = 0.1, epsilon: float = 0.05, iterations: int = 3, *,
                 normalize: bool = True, reduction: str = "mean"):  # fmt: skip
        super().__init__(normalize=normalize, reduction=reduction)
        self.temperature = positive("temperature", temperature, not_learned=NT_XENT_ALONE)
        self.epsilon = fixed("epsilon", positive("epsilon", epsilon))
        self.iterations = whole("iterations", iterations) or refuse("iterations", iterations, "give at least 1")

    def assign(self, keys: Tensor, prototypes: Tensor, pairs: Pairs) -> Assignment:
        rows, counts = keys, None
        if pairs.bank is not None:
            if len(pairs.bank) != len(keys):
                refuse_tensor("bank", pairs.bank, f"[{len(keys)},M,{pairs.D}], one queue per view that assigns")
            mine = pairs.bank[:, distributed.rank() :: distributed.world()].to(keys.dtype)
            rows = torch.cat([keys, mine], dim=1)
            full = (pairs.bank != 0).any(-1).all(-1)
            counts = torch.ones_like(rows[..., 0], dtype=torch.bool)
            counts[:, pairs.B :] = full[:, None]
        bias = sinkhorn_potentials(
            rows @ prototypes.T, epsilon=self.epsilon, iterations=self.iterations, counts=counts,
            gather=distributed.gather,
        )  # fmt: skip
        return Assignment(keys / self.epsilon, prototypes, bias)
