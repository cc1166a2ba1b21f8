"""V views, N images of all ranks, D width.  z [V,B,D], states and prior [V N, D], directions [D,D]."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from kontrast import distributed
from kontrast.kernels.projections import PRIORS, directions_and_prior, sliced_wasserstein
from kontrast.objectives.arguments import Number, choice, positive, weight, whole
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.buffer_updates import advance, buffer_on
from kontrast.objectives.link_rows import stack
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("swd")
class SWD(Objective):
    r"""Alignment, and a sliced Wasserstein distance of the projections to a prior (GCL, table 1 and algorithm 1).

        loss = 1/2 mean_{i,d} (z_id - z_id+)^2 + lambda mean_{r,d} (sort(Z W)_rd - sort(P W)_rd)^2

    P are draws from the prior and W is a random orthogonal matrix. Both are drawn anew after each backward pass, from
    the counter `step`, and are the same on each rank and after resuming. (Activation checkpointing, which computes the
    loss again, sees different draws.) Only the `hypersphere` normalizes z.

    When to use it: to choose the distribution of the projections yourself: a sphere, a cube or a normal distribution.
    It is a few points behind NT-Xent on CIFAR-10 here, and depends on lambda. It suffers from competing features as NT-
    Xent does.

    Reference: Chen, Luo and Li, Intriguing Properties of Contrastive Losses, NeurIPS 2021.

    Args:
        prior: `hypersphere`, `hypercube` or `normal`.
        distribution_weight: lambda, at least 0.
        align_weight: weight of the alignment: 1/2 in the paper's code, 1 in table 1.
        loss_scale: multiplies the loss. The paper uses 1000 for the hypersphere.
        divisor: `mean` as above, or `paper`: divide by the width twice instead of by rows and width.
        seed: seed of the draws, a whole number.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import SWD
        >>> SWD(prior="normal", distribution_weight=0.0)(torch.eye(4), -torch.eye(4))
        tensor(0.5000)
    """

    paper = "GCL, table 1 and algorithm 1"
    equation = r"""
        L = \frac{1}{2} \mathrm{mean}_{i,d} (z_{id} - z_{id}^+)^2
            + \lambda\, \mathrm{mean}_{r,d} \left( \mathrm{sort}(Z W)_{rd} - \mathrm{sort}(P W)_{rd} \right)^2
    """
    step: torch.Tensor

    # fmt: off
    def __init__(
        self, prior: str = "hypersphere", distribution_weight: Number = 5.0, *, align_weight: Number = 0.5,
        loss_scale: Number = 1.0, divisor: str = "mean", seed: int = 0,
    ):
        # fmt: on
        super().__init__(normalize=choice("prior", prior, PRIORS) == "hypersphere")
        self.prior = prior
        self.distribution_weight = weight("distribution_weight", distribution_weight)
        self.align_weight = weight("align_weight", align_weight)
        self.loss_scale = positive("loss_scale", loss_scale)
        self.divisor = choice("divisor", divisor, ("mean", "paper"))
        self.seed = whole("seed", seed)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def contrast(self, pairs: Pairs) -> Terms:
        z = pairs.z.unbind()
        k = pairs.k.unbind() if pairs.teacher else z
        links = pairs.one_way_links()
        apart = distributed.mean(mse_loss(stack([z[v] for v, _ in links]), stack([k[w] for _, w in links])))
        states = distributed.gather(pairs.z, dim=1).reshape(-1, pairs.D)
        step = buffer_on(states.device, self, "step")
        W, P = directions_and_prior(self.prior, len(states), pairs.D, self.seed, step, states.dtype)
        distance = advance(sliced_wasserstein(states, P, W), self.step)
        factor = len(states) / pairs.D if self.divisor == "paper" else 1.0
        return Terms(
            attraction=self.loss_scale * self.align_weight * apart,
            repulsion=self.loss_scale * self.distribution_weight * factor * distance,
        )
