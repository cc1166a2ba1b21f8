"""Projection heads and predictors, as each paper or its code has them.

N rows, F width of the representation (`inputs`), H hidden width, D width of the projection (`outputs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from kontrast.errors import UsageError
from kontrast.networks.catalog import HEADS, PREDICTORS


class Perceptron(nn.Sequential):
    """Linear layers of the given widths with batch norm and ReLU between them.

    last: what follows the last linear layer: `bias` (nothing, but the layer has a bias), `none` (neither),
    `norm` (batch norm), `scale` (batch norm with a scale and no shift) or `plain-norm` (batch norm with neither).
    """

    def __init__(self, widths: Sequence[int], *, last: str = "bias", norm: bool = True):
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths[:-1]):
            layers.append(nn.Linear(inputs, outputs, bias=not norm))
            layers += [nn.BatchNorm1d(outputs)] if norm else []
            layers.append(nn.ReLU(inplace=True))
        layers.append(nn.Linear(widths[-2], widths[-1], bias=last == "bias"))
        if last in ("norm", "scale", "plain-norm"):
            layers.append(nn.BatchNorm1d(widths[-1], affine=last != "plain-norm"))
        if last == "scale":
            layers[-1].bias.requires_grad_(False)
        super().__init__(*layers)
        self.width = widths[-1]


@HEADS.register("simclr")
def simclr(inputs: int, outputs: int = 128, hidden: int | None = None, layers: int = 2) -> Perceptron:
    """SimCLR's TensorFlow code: hidden layers as wide as the encoder, the last batch norm with scale only.
    Three layers in that repository, two in the generalised contrastive loss."""
    return Perceptron([inputs] + [hidden or inputs] * (layers_in(layers, 2, 3) - 1) + [outputs], last="scale")


@HEADS.register("identity")
class Identity(nn.Identity):
    """The representation itself is contrasted."""

    def __init__(self, inputs: int):
        super().__init__()
        self.width = inputs


@HEADS.register("linear")
def linear(inputs: int, outputs: int = 128) -> Perceptron:
    """One linear layer with a bias (MoCo's CIFAR demonstration)."""
    return Perceptron([inputs, outputs])


@HEADS.register("fc8")
def fc8(inputs: int, outputs: int = 128) -> Perceptron:
    """SmallAlexNet's last layer: linear, weights from N(0, 0.02), zero bias."""
    head = Perceptron([inputs, outputs])
    nn.init.normal_(head.get_parameter("0.weight"), std=0.02)
    nn.init.zeros_(head.get_parameter("0.bias"))
    return head


@HEADS.register("hcl")
def hcl(inputs: int, outputs: int = 128, hidden: int = 512) -> Perceptron:
    """The head of the hard-negative (HCL) and DCL code: F to 512 with batch norm and ReLU, then 128 with a bias."""
    return Perceptron([inputs, hidden, outputs])


@HEADS.register("moco-v2")
def moco_v2(inputs: int, outputs: int = 128, hidden: int | None = None) -> Perceptron:
    """MoCo v2 and JCL: two layers with ReLU and no batch norm."""
    return Perceptron([inputs, hidden or inputs, outputs], norm=False)


@HEADS.register("moco-v3")
def moco_v3(inputs: int, outputs: int = 256, hidden: int = 4096, layers: int = 2) -> Perceptron:
    """MoCo v3's projector: no biases, the last batch norm without scale and shift. Two layers for ResNets, three for
    ViTs."""
    return Perceptron([inputs] + [hidden] * (layers_in(layers, 2, 3) - 1) + [outputs], last="plain-norm")


@HEADS.register("uniclr")
def uniclr(inputs: int, outputs: int = 256, hidden: int = 2048) -> Perceptron:
    """UniCLR's paper: three layers, batch norm and ReLU after the first two, batch norm after the last. 2048-2048-256
    on CIFAR, 2048-2048-2048 on ImageNet."""
    return Perceptron([inputs, hidden, hidden, outputs], last="norm")


@HEADS.register("byol")
def byol(inputs: int, outputs: int = 256, hidden: int = 4096) -> Perceptron:
    """BYOL's projector: two layers, batch norm and ReLU between them."""
    return Perceptron([inputs, hidden, outputs])


@HEADS.register("simsiam")
def simsiam(inputs: int, outputs: int = 2048, hidden: int = 2048, layers: int = 3) -> Perceptron:
    """SimSiam's projector: three layers (two on CIFAR), the last batch norm without scale and shift."""
    return Perceptron([inputs] + [hidden] * (layers_in(layers, 2, 3) - 1) + [outputs], last="plain-norm")


@HEADS.register("expander")
def expander(inputs: int, outputs: int = 2048, hidden: int | None = None, layers: int = 3) -> Perceptron:
    """The wide head of VICReg and Barlow Twins: three layers of one width, the last without bias or norm."""
    return Perceptron([inputs] + [hidden or outputs] * (layers_in(layers, 2, 3) - 1) + [outputs], last="none")


HEADS.register("vicreg")(expander)
HEADS.register("barlow")(expander)


@PREDICTORS.register("byol")
def byol_predictor(inputs: int, hidden: int = 4096) -> Perceptron:
    """BYOL's predictor: as its projector."""
    return Perceptron([inputs, hidden, inputs])


@PREDICTORS.register("simsiam")
def simsiam_predictor(inputs: int, hidden: int | None = None) -> Perceptron:
    """SimSiam's predictor: a bottleneck of a quarter of the width."""
    return Perceptron([inputs, hidden or max(1, inputs // 4), inputs])


@PREDICTORS.register("moco-v3")
def moco_v3_predictor(inputs: int, hidden: int = 4096, last_norm: bool = False) -> Perceptron:
    """MoCo v3's predictor: two layers without biases; ViTs have the last batch norm too."""
    return Perceptron([inputs, hidden, inputs], last="plain-norm" if last_norm else "none")


@PREDICTORS.register("uniclr")
def uniclr_predictor(inputs: int, hidden: int = 512) -> Perceptron:
    """UniCLR with a momentum teacher: two layers, hidden 512 on CIFAR and 4096 on ImageNet, no last norm."""
    return Perceptron([inputs, hidden, inputs], last="none")


def layers_in(layers: int, *allowed: int) -> int:
    if layers not in allowed:
        raise UsageError(f"layers = {layers!r}: this head has {' or '.join(map(str, allowed))}")
    return layers
