"""V query views, N images of all ranks, D width, P links of views.  y [V,B,D] whitened features, similarity [P,B]."""

from __future__ import annotations

from kontrast.objectives.arguments import choice, optional_weight
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.inputs import Inputs
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("sim-trace")
class SimTrace(Objective):
    r"""Maximise the trace of the whitened affinity matrix (UniCLR, equation 3).

        loss = -1/N trace( (Z - mu) Sigma^-1 (Z' - mu)^T ) = -1/N sum_i <y_i, y_i'>

    mu and Sigma (unbiased) are of all views (and keys) together, so the loss can't gain by a collapse: it is -D/2
    (2N-1)/N plus half the whitened mean squared error. `variant`: `paper` has gradient through Sigma and a relative
    ridge (1e-3 where None); `mocov3`, the released code, has unit rows, mu and Sigma constant, with keys those of each
    query view and key view, and Sigma + ridge I (0.01 where None); `auto` is mocov3 with keys and paper without.
    `scaling="sum"` is the text's: Sigma a sum, no 1/N, so the loss is between -D/2 and D/2.

    Reference: Li et al., A Unified Framework for Contrastive Learning from a Perspective of Affinity Matrix, 2022.
    """

    paper = "UniCLR, equation 3"

    def __init__(self, ridge: float | None = None, *, variant: str = "auto", scaling: str = "mean"):
        super().__init__(normalize=False)
        self.ridge = optional_weight("ridge", ridge)
        self.variant = choice("variant", variant, ("auto", "paper", "mocov3"))
        self.scaling = choice("scaling", scaling, ("mean", "sum"))

    def pairs(self, inputs: Inputs) -> Pairs:
        code = self.variant == "mocov3" or (self.variant == "auto" and inputs.keys is not None)
        ridge = self.ridge if self.ridge is not None else (0.01 if code else 1e-3)
        return Pairs(inputs, normalize=code).whitened(ridge, absolute=code, detach=code, by_link=code)

    def contrast(self, pairs: Pairs) -> Terms:
        links = pairs.one_way()
        factor = 1.0 if self.scaling == "mean" else pairs.N / (pairs.pooled_count - 1)
        return Terms(attraction=-factor * pairs.by_anchor(pairs.linked(links), links))
