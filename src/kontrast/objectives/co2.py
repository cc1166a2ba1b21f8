"""V query views, W key views, B images, P links of two views.  rows and mean vectors [V,B,D] or [W,B,D], bank [M,D]."""

from __future__ import annotations

from torch import Tensor

from kontrast.kernels.mean_vectors import mean_vectors
from kontrast.objectives.arguments import Number, choice, positive, refuse, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms, objective
from kontrast.objectives.inputs import Inputs
from kontrast.objectives.link_rows import select_rows
from kontrast.objectives.pairs import Pairs

FALLS = "the consistency falls to 0 without learning anything"


@OBJECTIVES.register("co2")
class CO2(Objective):
    r"""A contrastive loss, and consistency of a query and its key in how they see the bank (CO2).

        P, Q = softmax over the bank of <k, n>/tau_c and <q, n>/tau_c
        loss = base + alpha/2 [KL(P||Q) + KL(Q||P)],      KL(P||Q) + KL(Q||P) = <k - q, m_P - m_Q>/tau_c

    m_P and m_Q are the means of the rows of the bank under P and Q. The positive is in neither softmax. With keys,
    only the query gets a gradient, through both divergences; without keys both views do, and each pair of views counts
    once. With several positive keys, the consistency is the mean of theirs.

    When to use it: if you train with a teacher and a bank and want negatives that look like the image not to be pushed
    as hard as the others. It needs a bank and costs one more pass over it. Without a bank, take another loss.

    Reference: Wei et al., CO2: Consistent Contrast for Unsupervised Visual Representation Learning, ICLR 2021.

    Args:
        base: the contrastive loss, by name or as an objective; it must take a bank.
        consistency_weight: alpha, at least 0. The paper has 10 with MoCo and 0.3 with MoCo v2.
        consistency_temperature: tau_c, divides the similarities to the bank: 0.04 with MoCo, 0.05 with MoCo v2.
        **arguments: arguments of the base, for example `temperature`, if it is given by name.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D], which is needed; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import CO2
        >>> CO2(temperature=0.5).terms(torch.eye(4), torch.eye(4), bank=-torch.eye(4))["consistency"]
        tensor(0.)
    """

    paper = "CO2 (Wei et al., 2021)"
    equation = r"""
        L = L_{\mathrm{base}} + \frac{\alpha}{2} \left[ \mathrm{KL}(P \Vert Q) + \mathrm{KL}(Q \Vert P) \right],
        P = \mathrm{softmax}_n(\langle k, n \rangle / \tau_c), \; Q
            = \mathrm{softmax}_n(\langle q, n \rangle / \tau_c)
    """
    takes_bank = True
    needs_bank = True

    def __init__(
        self, base: str | Objective = "info-nce", *, consistency_weight: Number = 10.0,
        consistency_temperature: Number = 0.04, **arguments: object,
    ):  # fmt: skip
        name, given = (type(base).__name__, base) if isinstance(base, Objective) else (base, None)
        loss = given if given and not arguments else objective(choice("base", base, [*OBJECTIVES]), **arguments)
        if not loss.takes_bank or loss.needs_bank or loss.needs_prototypes or loss.needs_indices:
            refuse("base", name, "give an objective that takes a bank [M,D] and needs nothing else")
        super().__init__(normalize=loss.normalize, reduction=loss.reduction)
        self.base, self.arguments, self.loss = name, arguments, loss
        self.consistency_weight = weight("consistency_weight", consistency_weight, not_learned=FALLS)
        self.consistency_temperature = positive("consistency_temperature", consistency_temperature, not_learned=FALLS)

    def pairs(self, inputs: Inputs) -> Pairs:
        return self.loss.pairs(inputs)

    def contrast(self, pairs: Pairs) -> Terms:
        consistency = self.consistency_weight * half_divergence(pairs, 1 / self.consistency_temperature)
        return Terms(**self.loss.contrast(pairs), consistency=consistency)


def half_divergence(pairs: Pairs, scale: Number) -> Tensor:
    """Return half of KL(P||Q) + KL(Q||P) of each query view with its keys, or with later views: [V,B] or fewer rows."""
    assert pairs.bank is not None
    bank, links = pairs.bank.to(pairs.dtype), pairs.one_way_links()

    def rows_and_means(views: Tensor) -> tuple[Tensor, Tensor]:
        rows = (scale * views).to(pairs.dtype)  # rounded in both factors below, or their product might be negative
        return rows.to(views.dtype), mean_vectors(rows.flatten(0, 1), bank, scale=1.0).view_as(views)

    q, Q = rows_and_means(pairs.z)
    k, P = rows_and_means(pairs.k) if pairs.teacher else (q, Q)
    queries, keys = ([link[side] for link in links] for side in (0, 1))
    rows, means = (select_rows(x, keys) - select_rows(y, queries) for x, y in ((k, q), (P, Q)))
    return pairs.sum_by_query(0.5 * (rows * means).sum(-1), links)
