"""V views, B images, N of all ranks.  G [B], rows [V,B], indices [B], the buffers log_u, tau and velocity [images]."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kontrast.kernels.dense import accumulation_type
from kontrast.objectives.arguments import fixed, positive, refuse, weight
from kontrast.objectives.base import OBJECTIVES, Terms
from kontrast.objectives.buffer_updates import buffer_on, gather_updates, update_in_backward
from kontrast.objectives.inputs import indices_below
from kontrast.objectives.learned_temperature import temperature_range
from kontrast.objectives.pairs import Pairs
from kontrast.objectives.scheduled_number import on_device
from kontrast.objectives.sogclr import SogCLR, running_estimate, share

LARGEST_GRADIENT = 3.0  # of a temperature; larger ones are clipped, as in the released code


@OBJECTIVES.register("isogclr")
class ISogCLR(SogCLR):
    r"""SogCLR with a temperature for each image, which is learned beside the network (iSogCLR).

        g_i    = mean_{j: rows of other images} exp(<z_i, z_j>/tau_i)
        u_i    = (1 - gamma) u_image + gamma g_i,      u_i = g_i if the image is new
        loss_i = -<z_i, z_i+> + tau_i log u_i + tau_i radius

        G      = radius + log u_i - (g_i/u_i) sum_j w_ij <z_i, z_j>/tau_i,     w_ij = softmax_j(<z_i, z_j>/tau_i)
        v      = (1 - beta) v + beta mean_views(clip(G)),      tau_i = tau_i - temperature_lr v

    With gamma = 1 the gradient G of a temperature is radius - KL(w_i || uniform). A temperature thus settles where the
    divergence of the image's weights from uniform ones is the radius: an image with many similar neighbors, whose
    weights would be spread widely, gets a larger one than an image with few. G is clipped to [-3, 3]. u, tau and v of
    the images of the batch are replaced after each backward pass, and are the same on all ranks.

    When to use it: instead of SogCLR if the classes of the data have very different sizes, so that no temperature suits
    them all. It stores three numbers per image, and like SogCLR it needs many epochs.

    Reference: Qiu et al., Not All Semantics are Created Equal: Contrastive Self-supervised Learning with Automatic
    Temperature Individualization, ICML 2023.

    Args:
        images: number of images in the data set; indices must be less.
        temperature: tau of every image at the start.
        gamma: share of the new batch in the estimate, above 0 and at most 1. It may be changed during training, also
            in a captured graph.
        radius: the divergence at which a temperature settles; larger makes temperatures smaller. At least 0.
        temperature_lr: the learning rate of the temperatures.
        beta: share of the new gradient in the momentum v, above 0 and at most 1.
        temperature_bounds: the least and the largest temperature. Default: 0.05 and 1, or as far as the first one.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], keys [W,B,D], indices [B]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import ISogCLR
        >>> loss = ISogCLR(images=50_000, temperature=0.5, radius=0.0)
        >>> loss(torch.eye(4), torch.eye(4), indices=torch.tensor([7, 123, 49_999, 0]))
        tensor(-1.)
    """

    paper = "iSogCLR (Qiu et al., 2023)"
    equation = r"""
        \ell_i = -\langle z_i, z_i^+ \rangle + \tau_i \log u_i + \tau_i\, \rho,
        u_i \leftarrow (1 - \gamma)\, u_i + \gamma\, \mathrm{mean}_j\, e^{\langle z_i, z_j \rangle / \tau_i}, \quad
            \tau_i \leftarrow \tau_i - \eta\, \partial \ell_i / \partial \tau_i
    """
    tau: Tensor
    velocity: Tensor

    def __init__(self, images: int = 1_048_576, temperature: float = 0.1, gamma: float = 0.8, radius: float = 0.4, *,
                 temperature_lr: float = 0.03, beta: float = 0.5, temperature_bounds: Sequence[float] | None = None,
                 normalize: bool = True, reduction: str = "mean"):  # fmt: skip
        super().__init__(images, temperature, gamma, normalize=normalize, reduction=reduction)
        self.temperature_bounds = bounds = temperature_bounds
        if bounds is None:
            bounds = min(0.05, self.temperature), max(1.0, self.temperature)
        self.limits = least, largest = temperature_range("temperature_bounds", bounds)
        if not least <= self.temperature <= largest:
            refuse("temperature", temperature, f"give a number within temperature_bounds, {[least, largest]}")
        self.radius = fixed("radius", weight("radius", radius))
        self.temperature_lr = fixed("temperature_lr", positive("temperature_lr", temperature_lr))
        self.beta = fixed("beta", share("beta", beta))
        self.register_buffer("tau", torch.full((self.images,), self.temperature))
        self.register_buffer("velocity", torch.zeros(self.images))

    def contrast(self, pairs: Pairs) -> Terms:
        indices = indices_below(self.images, pairs.given.indices)
        stored = [buffer_on(pairs.given.z.device, self, name) for name in ("log_u", "tau", "velocity")]
        old, tau, velocity = (x.index_select(0, indices).to(accumulation_type(pairs.given.z)) for x in stored)
        negatives = pairs.negatives(1 / tau.repeat(pairs.V), with_mean=True)
        log_g = negatives.lse - math.log(pairs.negative_count)
        log_u = running_estimate(old, log_g.detach(), on_device(self, "gamma"))
        ratio = torch.exp(log_g.detach() - log_u)
        repulsion = tau * (log_u + self.radius + ratio * (log_g - log_g.detach()))
        gradient = self.radius + log_u - ratio * negatives.mean.detach() / tau
        velocity = torch.lerp(velocity, gradient.clamp(-LARGEST_GRADIENT, LARGEST_GRADIENT).mean(0), self.beta)
        moved = (tau - self.temperature_lr * velocity).clamp(*self.limits)
        after = torch.stack([log_u.logsumexp(0) - math.log(pairs.V), moved, velocity])
        places, values = gather_updates(indices, after)
        for buffer, value in zip(stored, values):
            repulsion = update_in_backward(repulsion, buffer, value, places)
        return Terms(attraction=-pairs.positive, repulsion=repulsion)

    def learned_numbers(self) -> dict[str, float]:
        """Return the mean temperature of the images that were seen."""
        seen = self.tau[~torch.isneginf(self.log_u)]
        return {"temperature": seen.mean().item()} if len(seen) else {}
