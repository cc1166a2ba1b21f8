"""Projection heads and predictors, as in each paper or its code.

N rows, F width of the representation (`inputs`), H hidden width, D width of the projection (`outputs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from kontrast.networks.catalog import HEADS, PREDICTORS
from kontrast.networks.checks import check_whole


class Perceptron(nn.Sequential):
    """Linear layers with batch norm and an activation between them.

    Args:
        widths: width of the input and of each layer's output.
        last: how the last layer ends: "bias" (a bias), "none" (no bias), "norm" (batch norm), "scale" (batch norm with
            scale and without shift) or "plain-norm" (batch norm with neither).
        norm: batch norm between the layers; without it they have biases.
        gelu: GELU instead of ReLU.
    """

    def __init__(self, widths: Sequence[int], *, last: str = "bias", norm: bool = True, gelu: bool = False):
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths[:-1]):
            layers.append(nn.Linear(inputs, outputs, bias=not norm))
            layers += [nn.BatchNorm1d(outputs)] if norm else []
            layers.append(nn.GELU() if gelu else nn.ReLU(inplace=True))
        layers.append(nn.Linear(widths[-2], widths[-1], bias=last == "bias"))
        if last in ("norm", "scale", "plain-norm"):
            layers.append(nn.BatchNorm1d(widths[-1], affine=last != "plain-norm"))
        if last == "scale":
            layers[-1].bias.requires_grad_(False)
        super().__init__(*layers)
        self.width = widths[-1]


@HEADS.register("simclr")
def simclr(inputs: int, outputs: int = 128, hidden: int | None = None, layers: int = 2) -> Perceptron:
    """SimCLR's head in its TensorFlow code: hidden layers as wide as the encoder, a last batch norm without shift.

    It has three layers in that repository, and two in the generalized contrastive loss, which also tries one and three.
    """
    return Perceptron([inputs, *hidden_widths(hidden or inputs, layers, least=1), outputs], last="scale")


@HEADS.register("identity")
class Identity(nn.Identity):
    """No head: the representation itself is contrasted."""

    def __init__(self, inputs: int):
        super().__init__()
        self.width = inputs


@HEADS.register("linear")
def linear(inputs: int, outputs: int = 128) -> Perceptron:
    """One linear layer with a bias (MoCo's CIFAR demo)."""
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
    """The head of MoCo v2 and JCL: two layers with ReLU and no batch norm."""
    return Perceptron([inputs, hidden or inputs, outputs], norm=False)


@HEADS.register("moco-v3")
def moco_v3(inputs: int, outputs: int = 256, hidden: int = 4096, layers: int = 2) -> Perceptron:
    """MoCo v3's projector: no biases, a last batch norm without scale and shift.

    It has two layers for ResNets and three for ViTs.
    """
    return Perceptron([inputs, *hidden_widths(hidden, layers), outputs], last="plain-norm")


@HEADS.register("uniclr")
def uniclr(inputs: int, outputs: int = 256, hidden: int = 2048) -> Perceptron:
    """UniCLR's head: three layers, batch norm and ReLU after the first two, batch norm after the last.

    Its widths are 2048-2048-256 on CIFAR and 2048-2048-2048 on ImageNet.
    """
    return Perceptron([inputs, hidden, hidden, outputs], last="norm")


@HEADS.register("byol")
def byol(inputs: int, outputs: int = 256, hidden: int = 4096) -> Perceptron:
    """BYOL's projector: two layers, batch norm and ReLU between them."""
    return Perceptron([inputs, hidden, outputs])


@HEADS.register("simsiam")
def simsiam(inputs: int, outputs: int = 2048, hidden: int = 2048, layers: int = 3) -> Perceptron:
    """SimSiam's projector: three layers (two on CIFAR), a last batch norm without scale and shift."""
    return Perceptron([inputs, *hidden_widths(hidden, layers), outputs], last="plain-norm")


@HEADS.register("expander")
def expander(inputs: int, outputs: int = 2048, hidden: int | None = None, layers: int = 3) -> Perceptron:
    """The wide head of VICReg and Barlow Twins: three layers of one width, the last without bias or norm."""
    return Perceptron([inputs, *hidden_widths(hidden or outputs, layers), outputs], last="none")


@HEADS.register("swav")
def swav(inputs: int, outputs: int = 128, hidden: int = 2048) -> Perceptron:
    """SwAV's head: two layers, batch norm and ReLU between them."""
    return Perceptron([inputs, hidden, outputs])


@HEADS.register("dino")
def dino(inputs: int, outputs: int = 256, hidden: int = 2048, layers: int = 3, batch_norm: bool = False) -> Perceptron:
    """DINO's head without its last layer, the prototypes: GELU between three layers, weights from N(0, 0.02) cut at 2.

    The code's `use_bn_in_head` is `batch_norm`: batch norm before each GELU.
    """
    head = Perceptron([inputs, *hidden_widths(hidden, layers), outputs], norm=batch_norm, gelu=True)
    for layer in head:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return head


HEADS.register("vicreg")(expander)
HEADS.register("barlow")(expander)


@PREDICTORS.register("byol")
def byol_predictor(inputs: int, hidden: int = 4096) -> Perceptron:
    """BYOL's predictor: two layers, batch norm and ReLU between them, like its projector."""
    return Perceptron([inputs, hidden, inputs])


@PREDICTORS.register("simsiam")
def simsiam_predictor(inputs: int, hidden: int | None = None) -> Perceptron:
    """SimSiam's predictor: two layers with a bottleneck of a quarter of the width."""
    return Perceptron([inputs, hidden or max(1, inputs // 4), inputs])


@PREDICTORS.register("moco-v3")
def moco_v3_predictor(inputs: int, hidden: int = 4096, last_norm: bool = False) -> Perceptron:
    """MoCo v3's predictor: two layers without biases; for ViTs with a last batch norm (`last_norm`)."""
    return Perceptron([inputs, hidden, inputs], last="plain-norm" if last_norm else "none")


@PREDICTORS.register("uniclr")
def uniclr_predictor(inputs: int, hidden: int = 512) -> Perceptron:
    """UniCLR's predictor for a momentum teacher: two layers, hidden 512 on CIFAR and 4096 on ImageNet."""
    return Perceptron([inputs, hidden, inputs], last="none")


def hidden_widths(width: int, layers: int, least: int = 2) -> list[int]:
    """Return the widths of all layers but the last, which is one of `least` to three."""
    return [width] * (check_whole("layers", layers, least=least, most=3) - 1)
