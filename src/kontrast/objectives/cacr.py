"""V query views, B images, K positives of an anchor.  costs [...,K]; attraction [V,B], repulsion [V,B] or a scalar."""

from __future__ import annotations

from kontrast.kernels.row_loss import RowLoss
from kontrast.objectives.arguments import Number, choice, fixed, is_zero, positive, refuse, switch, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.conditional import conditional_mean, formula, hinge, moco_v3_terms, negative_repulsion
from kontrast.objectives.pairs import Pairs

SIGNS = {"contrastive": 1.0, "uniform": 0.0, "reversed": -1.0}


@OBJECTIVES.register("cacr")
class CACR(Objective):
    r"""Contrastive attraction and repulsion: far positives pull more, near negatives push more (CACR, equation 2).

        loss = mean_i sum_k w+_ik c_ik - mean_i sum_j w-_ij c_ij,      c = ||z - z'||^2 = 2 - 2 <z, z'>
        w+   = softmax_k(t_plus c_ik),  w- = softmax_j(-t_minus c_ij)

    With keys or a bank, the negatives are the bank, or the keys of other images without one, together with the same
    view of other images; `negatives` is then ignored. With two views and `symmetric`, `objective(images, texts)` is the
    mean of CACR from images to texts and from texts to images. Images with the same label are no negatives of each
    other.

    The released code on MoCo v3 (`variant="mocov3"`) instead weights the queries of each key, local crops among them:

        loss = mean_{i, key view w} sum_{v != w} p_v l_v,    p = softmax_v(t_plus ||q_v - k_w||^2)
        l_v  = 2 tau CE(<q_v, k>/tau), tau = 1/(2 t_minus), with cost `rbf`;   c - sum_j w-_j c_j with `euclidean`

    There t_plus = 2 t_minus = 1/tau, and w- is constant, for which `euclidean` needs `detach_negative_weights`. With
    two views p is 1, and `rbf` is exactly half of MoCo v3's loss, whatever t_plus is; use more views. (The code's
    `euclidean` form sums over images: it is N/2 times ours.)

    When to use it: with four or more views: with one positive its attraction is a plain distance, and it is about as
    good as NT-Xent. With four positives it was better than every method with one on CIFAR-10 here, for two and a half
    times the views. Start from t_plus 1 and t_minus 2; a large t_plus follows the worst crop.

    Reference: Zheng et al., Contrastive Attraction and Contrastive Repulsion for Representation Learning, TMLR 2023.

    Args:
        t_plus: sharpness of the weights of positives, at least 0. A tensor gets its gradient, also of constant weights.
        t_minus: sharpness of the weights of negatives, at least 0. A number if they are constant or reversed.
        negatives: other images of each later view (`cross-view`, the paper's code) or of the `same-view` (its text).
        cost: `euclidean` as above, or `rbf`: repulsion log mean_i sum_j w- exp(-rbf_t c_ij) (equation 14).
        attraction: `contrastive`, `uniform` (a plain mean), or `reversed` (-t_plus; tables 10 and 11).
        repulsion: `contrastive`, `uniform` (a plain mean), or `reversed` (-t_minus). Both uniform: UAUR.
        rbf_t: sharpness of the rbf cost; a number where t_minus has to be one.
        detach_positive_weights: treat w+ as constant in the gradient. None: only with keys.
        detach_negative_weights: treat w- as constant. `bank`: only that of bank or keys, as the momentum code.
        symmetric: use cross-view negatives in both directions: of each earlier view too.
        margin: m of the triplet loss max(0, attraction + repulsion + m) of each anchor, at least 0, whose cross-view
            negatives are always symmetric. None: no hinge.
        variant: `paper`, or `mocov3` with its two costs; it ignores `negatives`, `symmetric` and `rbf_t`.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], bank [M,D], labels [B]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import CACR
        >>> CACR(t_plus=1.0)(torch.eye(4), torch.eye(4))
        tensor(-2.)
    """

    paper = "CACR, equation 2"
    equation = r"""
        L = \mathrm{mean}_i \sum_k w^+_{ik} c_{ik} - \mathrm{mean}_i \sum_j w^-_{ij} c_{ij}, \quad c = \lVert z
            - z' \rVert^2,
        w^+ = \mathrm{softmax}_k(t^+ c_{ik}), \quad w^- = \mathrm{softmax}_j(-t^- c_{ij})
    """
    takes_bank = True
    takes_labels = True

    # fmt: off
    def __init__(
        self, t_plus: Number = 1.0, t_minus: Number = 2.0, negatives: str = "cross-view", cost: str = "euclidean",
        attraction: str = "contrastive", repulsion: str = "contrastive", *, rbf_t: Number = 2.0,
        detach_positive_weights: bool | None = None, detach_negative_weights: bool | str = False,
        symmetric: bool = False, margin: Number | None = None, variant: str = "paper", reduction: str = "mean",
    ):
        # fmt: on
        super().__init__(reduction=reduction)
        runs_to_0 = "its gradient is a variance, never negative, so it would run to 0"
        self.t_plus = weight("t_plus", t_plus, not_learned=runs_to_0)
        self.t_minus = weight("t_minus", t_minus, not_learned=runs_to_0)
        self.negatives = choice("negatives", negatives, ("cross-view", "same-view"))
        self.cost = choice("cost", cost, ("euclidean", "rbf"))
        self.rbf_t = positive("rbf_t", rbf_t, not_learned="the loss falls without bound as it grows")
        self.attraction = choice("attraction", attraction, tuple(SIGNS))
        self.repulsion = choice("repulsion", repulsion, tuple(SIGNS))
        detach = detach_positive_weights
        self.detach_positive_weights = None if detach is None else switch("detach_positive_weights", detach)
        self.detach_negative_weights = switch("detach_negative_weights", detach_negative_weights, "bank")
        if self.detach_negative_weights or self.repulsion == "reversed":  # a negative scale has no square root
            self.t_minus, self.rbf_t = fixed("t_minus", self.t_minus), fixed("rbf_t", self.rbf_t)
        self.symmetric, self.variant = switch("symmetric", symmetric), choice("variant", variant, ("paper", "mocov3"))
        self.margin = None if margin is None else weight("margin", margin)
        if margin is not None and (cost == "rbf" or variant == "mocov3"):
            refuse("margin", margin, "only cost 'euclidean' of variant 'paper' has a repulsion per anchor")
        if variant == "mocov3" and cost == "rbf" and (repulsion != "contrastive" or is_zero(self.t_minus)):
            refuse("variant", variant, "with cost 'rbf' it needs contrastive repulsion and t_minus above 0")

    def row_loss(self, images: int) -> RowLoss | None:
        if self.margin is not None or self.variant != "paper":
            return None
        return formula(self.cost, self.negatives, self.symmetric, self.t_plus, self.scale, self.detach_negative_weights)

    @property
    def scale(self) -> Number:
        return 0.0 if self.repulsion == "uniform" else 2 * SIGNS[self.repulsion] * self.t_minus

    def contrast(self, pairs: Pairs) -> Terms:
        t, symmetric = SIGNS[self.attraction] * self.t_plus, self.symmetric or self.margin is not None
        detach, constant = self.detach_positive_weights, self.detach_negative_weights
        detach = pairs.teacher if detach is None else detach
        if self.variant == "mocov3":
            return moco_v3_terms(pairs, self.cost, t, self.scale, detach, bool(constant))
        pull = pairs.reduce_positives(lambda s: conditional_mean(2 - 2 * s, t, detach))
        push = negative_repulsion(pairs, self.cost, self.negatives, symmetric, self.scale, self.rbf_t, constant)
        return Terms(attraction=pull, repulsion=push) if self.margin is None else hinge(pull, push, self.margin)
