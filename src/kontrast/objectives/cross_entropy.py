"""V views, B images, D width, C classes.  z [V,B,D], labels [B], logits [V,B,C]."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from kontrast.kernels.row_statistics import refuse
from kontrast.objectives.arguments import fixed, share, whole
from kontrast.objectives.base import OBJECTIVES, Objective, Terms
from kontrast.objectives.inputs import may_read_values
from kontrast.objectives.pairs import Pairs


@OBJECTIVES.register("cross-entropy")
class CrossEntropy(Objective):
    r"""Classify every view by a linear layer: supervised training, the baseline of methods without labels.

        l      = W z_i + b
        loss_i = -(1 - s) l_{y_i} - s mean_c l_c + log sum_c exp(l_c)

    W and b are parameters of the loss, trained with the network. The rows are not normalized, and the loss is the mean
    over views. Attraction is the first part, repulsion the log-sum-exp. The loss needs labels, from 0 to C - 1.

    When to use it: as the supervised baseline beside methods without labels: it says what the same network, views and
    epochs reach with every label. It is not meant to be the best supervised training.

    Reference: Szegedy et al., Rethinking the Inception Architecture for Computer Vision, CVPR 2016 (label smoothing).

    Args:
        classes: C, at least 2.
        width: D, the width of z.
        smoothing: s, the share of the label that is spread over all classes, from 0 to 1.
        reduction: `mean` over anchors, `sum`, or `simclr_tf`, the sum of the means of the views.

    Shape:
        z [V,B,D] or two views [B,D], labels [B]; the loss is a scalar.

    Example:
        >>> import torch
        >>> from kontrast.objectives import CrossEntropy
        >>> loss = CrossEntropy(classes=4, width=4)
        >>> _ = loss.classifier.load_state_dict({"weight": torch.eye(4), "bias": torch.zeros(4)})
        >>> loss(torch.eye(4), torch.eye(4), labels=torch.arange(4)).detach()  # log(e + 3) - 1
        tensor(0.7437)
    """

    paper = "supervised baseline"
    equation = r"""
        \ell_i = -(1 - s)\, l_{y_i} - s\, \mathrm{mean}_c\, l_c + \log \sum_c e^{l_c}, \quad l = W z_i + b
    """
    takes_labels = True
    needs_labels = True

    def __init__(self, classes: int = 10, width: int = 128, smoothing: float = 0.0, *, reduction: str = "mean"):
        super().__init__(normalize=False, reduction=reduction)
        self.classes, self.width = whole("classes", classes, least=2), whole("width", width, least=1)
        self.smoothing = fixed("smoothing", share("smoothing", smoothing))
        self.classifier = nn.Linear(self.width, self.classes)

    def contrast(self, pairs: Pairs) -> Terms:
        z, labels = pairs.z, pairs.labels
        assert labels is not None
        if self.width != pairs.D:
            refuse("z", z, f"[views, images, {self.width}], the width of the classifier")
        if may_read_values(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            found = f"{int(labels.min())} to {int(labels.max())}"
            raise ValueError(f"labels range from {found}: give 0 to {self.classes - 1}, or more classes")
        logits = linear(z, self.classifier.weight.to(z.dtype), self.classifier.bias.to(z.dtype))
        own = torch.stack([view.gather(1, labels[:, None])[:, 0] for view in logits.unbind()])
        attraction = -(1 - self.smoothing) * own - self.smoothing * logits.mean(-1)
        return Terms(attraction=attraction, repulsion=torch.logsumexp(logits, dim=-1))
