"""V views, W assigning views, B images, K prototypes, D width.  keys [W,B,D], center [K]."""

from __future__ import annotations

import torch
from torch import Tensor

from kontrast import distributed
from kontrast.kernels.row_statistics import refuse as refuse_tensor
from kontrast.kernels.sinkhorn import sinkhorn_potentials
from kontrast.objectives.arguments import NT_XENT_ALONE, Number, choice, fixed, number, positive, refuse, whole
from kontrast.objectives.base import OBJECTIVES, Terms
from kontrast.objectives.buffer_updates import buffer_on, update_in_backward
from kontrast.objectives.pairs import Pairs
from kontrast.objectives.prototype_objective import Assignment, PrototypeObjective, assigning_keys, key_prototypes
from kontrast.objectives.scheduled_number import on_device, scheduled_number


@OBJECTIVES.register("dino")
class DINO(PrototypeObjective):
    r"""Self-distillation: each view predicts the sharp, centered softmax of a teacher's view (DINO, equation 1).

        loss_i = -<z_i, sum_k p_k c_k>/tau + log sum_k exp(<z_i, c_k>/tau)
        p = softmax_k((<t, c'_k> - center_k)/tau_t)

    t are a teacher's projections of the global views (`keys`) and c' its prototypes (`key_prototypes`); without them,
    the student's own, detached. The loss is the mean over pairs of a global view and another view, global or local. The
    center is the running mean of the teacher's logits over the global views and all ranks. It changes in the backward
    pass, after its use. `centering="sinkhorn"` makes p an assignment with SwAV's algorithm instead (DINOv2), at epsilon
    tau_t and over all global views together.

    When to use it: for vision transformers with many epochs and multi-crop; that is what it was made for. It needs a
    momentum teacher, prototypes and schedules of several numbers, so it is not the first thing to try on a small data
    set. Watch the entropy of the targets: centering and sharpening have to balance.

    Reference: Caron et al., Emerging Properties in Self-Supervised Vision Transformers, ICCV 2021; Oquab et al.,
    DINOv2: Learning Robust Visual Features without Supervision, TMLR 2024.

    Args:
        prototypes: their number K, the length of the center.
        temperature: tau, divides the student's similarities.
        teacher_temperature: tau_t, divides the teacher's; smaller than tau, so that p is sharp. It may be changed
            during training, also in a captured graph.
        center_momentum: share of the old center in the new one, at least 0 and below 1.
        centering: `center` or `sinkhorn`.
        normalize: scale the rows of z and keys to length one. False takes them as they are.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], prototypes [K,D], keys [W,B,D]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import DINO
        >>> DINO(prototypes=4, temperature=0.5)(torch.eye(4), torch.eye(4), prototypes=torch.eye(4))
        tensor(0.3408)
    """

    paper = "DINO, equation 1"
    equation = r"""
        \ell_i = -\frac{1}{\tau} \langle z_i, \sum_k p_k c_k \rangle
            + \log \sum_k e^{\langle z_i, c_k \rangle / \tau},
        p = \mathrm{softmax}_k\!\left( \frac{\langle t, c'_k \rangle - \mathrm{center}_k}{\tau_t} \right)
    """
    center: Tensor
    teacher_temperature = scheduled_number("teacher_temperature", positive)

    def __init__(self, prototypes: int = 65536, temperature: Number = 0.1, teacher_temperature: float = 0.04,
                 center_momentum: float = 0.9, centering: str = "center", *,
                 normalize: bool = True, reduction: str = "mean"):  # fmt: skip
        super().__init__(normalize=normalize, reduction=reduction)
        self.prototypes = whole("prototypes", prototypes) or refuse("prototypes", prototypes, "give their number")
        self.temperature = positive("temperature", temperature, not_learned=NT_XENT_ALONE)
        self.teacher_temperature = fixed("teacher_temperature", positive("teacher_temperature", teacher_temperature))
        momentum = number("center_momentum", center_momentum, least=0.0, below=1.0)
        self.center_momentum = fixed("center_momentum", momentum)
        self.centering = choice("centering", centering, ("center", "sinkhorn"))
        self.register_buffer("center", torch.zeros(self.prototypes))

    def assign(self, keys: Tensor, prototypes: Tensor, pairs: Pairs) -> Assignment:
        if len(prototypes) != self.prototypes:
            refuse_tensor("prototypes", prototypes, f"[{self.prototypes},{pairs.D}], or DINO another number of them")
        tau = on_device(self, "teacher_temperature")
        if self.centering == "sinkhorn":
            scores = keys.flatten(0, 1) @ prototypes.T
            bias = sinkhorn_potentials(scores, epsilon=tau, gather=distributed.gather)
        else:
            bias = -buffer_on(keys.device, self, "center").to(keys) / tau
        return Assignment(keys / tau, prototypes, bias)

    def contrast(self, pairs: Pairs) -> Terms:
        terms = super().contrast(pairs)
        if self.centering == "center":
            # The mean logits are the logits of the mean key, so D numbers are sent and not K.
            mean = key_prototypes(pairs) @ distributed.mean(assigning_keys(pairs).mean((0, 1)))
            new = torch.lerp(mean, self.center.to(mean), self.center_momentum)
            terms["attraction"] = update_in_backward(terms.attraction, self.center, new)
        return terms
