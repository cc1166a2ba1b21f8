"""V query views, B images, K positives of an anchor.  costs [...,K]; attraction [V,B], repulsion [V,B] or a scalar."""

from __future__ import annotations

from kontrast.objectives.arguments import choice, optional_switch, positive, switch_or, weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.conditional import conditional_mean, euclidean_repulsion, rbf_repulsion
from kontrast.objectives.pairs import Pairs

SIGNS = {"contrastive": 1.0, "uniform": 0.0, "reversed": -1.0}


@OBJECTIVES.register("cacr")
class CACR(Objective):
    r"""Contrastive attraction and repulsion: far positives pull more, near negatives push more (CACR, equation 2).

        loss = mean_i sum_k w+_ik c_ik - mean_i sum_j w-_ij c_ij,      c = ||z - z'||^2 = 2 - 2 <z, z'>
        w+   = softmax_k(t_plus c_ik),  w- = softmax_j(-t_minus c_ij)

    `attraction`, `repulsion`: `uniform` takes plain means (both: UAUR), `reversed` flips a sign (tables 10, 11). `cost`
    rbf has repulsion log mean_i sum_j w- exp(-rbf_t c_ij), equation 14. `negatives`: other images of each later view,
    as the code, or of the same view, as the text. With keys or a bank: the bank, else keys of other images, beside
    other images' same view. Weights keep their gradient, but w+ with keys does not (None is that rule), and w- where
    `detach_negative_weights`; `bank`: in w- that of the bank or keys alone is constant, as in the momentum code.

    Reference: Zheng et al., Contrastive Attraction and Contrastive Repulsion for Representation Learning, TMLR 2023.
    """

    paper = "CACR, equation 2"
    takes_bank = True

    # fmt: off
    def __init__(
        self, t_plus: float = 1.0, t_minus: float = 2.0, negatives: str = "cross-view", cost: str = "euclidean",
        attraction: str = "contrastive", repulsion: str = "contrastive", *, rbf_t: float = 2.0,
        detach_positive_weights: bool | None = None, detach_negative_weights: bool | str = False,
        reduction: str = "mean",
    ):
        # fmt: on
        super().__init__(reduction=reduction)
        self.t_plus, self.t_minus = weight("t_plus", t_plus), weight("t_minus", t_minus)
        self.negatives = choice("negatives", negatives, ("cross-view", "same-view"))
        self.cost, self.rbf_t = choice("cost", cost, ("euclidean", "rbf")), positive("rbf_t", rbf_t)
        self.attraction = choice("attraction", attraction, tuple(SIGNS))
        self.repulsion = choice("repulsion", repulsion, tuple(SIGNS))
        self.detach_positive_weights = optional_switch("detach_positive_weights", detach_positive_weights)
        self.detach_negative_weights = switch_or("detach_negative_weights", detach_negative_weights, "bank")

    def contrast(self, pairs: Pairs) -> Terms:
        t, detach = SIGNS[self.attraction] * self.t_plus, self.detach_positive_weights
        detach = pairs.teacher if detach is None else detach
        attraction = pairs.over_positives(lambda s: conditional_mean(2 - 2 * s, t, detach))
        a, constant = 2 * SIGNS[self.repulsion] * self.t_minus, self.detach_negative_weights
        if self.cost == "rbf":
            repulsion = rbf_repulsion(pairs, self.negatives, a, self.rbf_t, constant)
        else:
            repulsion = euclidean_repulsion(pairs, self.negatives, a, constant)
        return Terms(attraction=attraction, repulsion=repulsion)
