"""V views, B images, N images of all ranks, D width, S directions, K knots.  z [V,B,D], sums [2,V,S,K]."""

from __future__ import annotations

import torch

from kontrast import distributed
from kontrast.kernels.characteristic import characteristic_sums, distance_to_normal
from kontrast.kernels.projections import unit_directions
from kontrast.objectives.arguments import Number, fixed, positive, share, whole
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.buffer_updates import advance, buffer_on
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("lejepa")
class LeJEPA(Objective):
    r"""Views drawn to their mean, while random projections of each view stay standard normal (LeJEPA, SIGReg).

        loss   = (1 - lambda) mean_{v,i,d} (z_vid - zbar_id)^2 + lambda mean_v SIGReg(z_v)
        SIGReg = mean over directions a of N integral |mean_i exp(i t <a, z_i>) - exp(-t^2/2)|^2 exp(-t^2/2) dt

    zbar is the mean of the global views, with gradient, and all views count in both terms. There is no normalization.
    The integral over [-t_K, t_K] is a trapezoidal sum over K knots in [0, t_K], and N counts the images of all ranks:
    normal projections have a SIGReg of 1.05 at any N, and collapsed ones of 0.40 N. The unit directions are drawn anew
    after each backward pass, from the counter `step`, and are the same on each rank and after resuming. (Activation
    checkpointing, which computes the loss again, sees different draws.) With a teacher, zbar is the mean of its keys.

    When to use it: if you want no teacher, no stopped gradient and one weight to choose. It compares the batch with a
    normal distribution, so it wants batches of a few hundred projections. Its projections are not normalized, and
    distances, not cosines, are what it shapes.

    Reference: Balestriero and LeCun, LeJEPA: Provable and Scalable Self-Supervised Learning Without the Heuristics,
    2025.

    Args:
        sigreg_weight: lambda, from 0 to 1.
        directions: S, how many random directions each step uses.
        knots: K, at least 2.
        largest: t_K, the last knot.
        seed: seed of the directions, a whole number.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import LeJEPA
        >>> LeJEPA(sigreg_weight=0.0)(torch.eye(4), -torch.eye(4))
        tensor(0.2500)
    """

    paper = "LeJEPA, SIGReg"
    equation = r"""
        L = (1 - \lambda)\, \mathrm{mean}_{v,i,d} \left( z_{vid} - \bar z_{id} \right)^2
            + \lambda\, \mathrm{mean}_v\, \mathrm{SIGReg}(z_v),
        \mathrm{SIGReg}(z)
            = \mathrm{mean}_a\, N \int \left| \mathrm{mean}_i\, e^{\mathrm{i} t \langle a, z_i \rangle}
            - e^{-t^2/2} \right|^2 e^{-t^2/2}\, dt
    """
    takes_global_views = True
    step: torch.Tensor

    def __init__(
        self, sigreg_weight: Number = 0.05, directions: int = 1024, knots: int = 17, largest: float = 3.0,
        *, seed: int = 0,
    ):  # fmt: skip
        super().__init__(normalize=False)
        self.sigreg_weight = share("sigreg_weight", sigreg_weight)
        self.directions, self.knots = whole("directions", directions, least=1), whole("knots", knots, least=2)
        self.largest = fixed("largest", positive("largest", largest))
        self.seed = whole("seed", seed)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def contrast(self, pairs: Pairs) -> Terms:
        z = pairs.z
        mean = (pairs.k if pairs.teacher else z[: pairs.given.global_views]).mean(0)
        step = buffer_on(z.device, self, "step")
        directions = unit_directions(self.directions, pairs.D, self.seed, step, z.dtype)
        sums = distributed.total(characteristic_sums(z, directions, knots=self.knots, largest=self.largest))
        sigreg = advance(distance_to_normal(sums, pairs.N, self.largest).mean(), self.step)
        return Terms(
            attraction=(1 - self.sigreg_weight) * (z - mean).square().mean(-1),
            repulsion=self.sigreg_weight * sigreg,
        )
