"""ConvN, the encoder and head of the RandBit study. [N,C,h,w] -> [N, 128 m] at width multiplier m."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kontrast.errors import UsageError
from kontrast.networks.catalog import ENCODERS, HEADS
from kontrast.networks.checks import check_whole

LARGEST_MULTIPLIER = 1000
KERAS: dict[str, Any] = {"momentum": 0.01, "eps": 1e-3}  # Keras' momentum 0.99 is torch's 1 - 0.99


@ENCODERS.register("convn")
class ConvN(nn.Module):
    """ConvN of the RandBit study, for images of 15 pixels or more.

    Three 3x3 convolutions of stride 2 without padding with 32, 64 and 64 channels, then a dense layer of 128. Batch
    norm and ReLU after each, no biases. An image of 28 pixels shrinks to 13, 6 and 2.

    Args:
        multiplier: multiplies the number of channels of every layer.
    """

    def __init__(self, channels: int = 3, size: int = 32, multiplier: float = 1.0):
        super().__init__()
        check_whole("size", size, least=15)
        usable = isinstance(multiplier, int | float) and not isinstance(multiplier, bool)
        if not usable or not 1 / 32 <= multiplier <= LARGEST_MULTIPLIER:
            raise UsageError(f"multiplier = {multiplier!r}: give a number from 1/32 to {LARGEST_MULTIPLIER}")
        layers: list[nn.Module] = []
        inputs, side = channels, size
        for outputs in (round(32 * multiplier), round(64 * multiplier), round(64 * multiplier)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, bias=False), nn.BatchNorm2d(outputs, **KERAS), nn.ReLU(True)]
            inputs, side = outputs, (side - 3) // 2 + 1
        self.layers = nn.Sequential(*layers)
        self.width = round(128 * multiplier)
        self.dense = nn.Sequential(
            nn.Linear(inputs * side**2, self.width, bias=False), nn.BatchNorm1d(self.width, **KERAS), nn.ReLU(True)
        )
        initialize_as_keras(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.layers(x).flatten(1))


@HEADS.register("convn")
def convn_head(inputs: int, outputs: int | None = None, hidden: int | None = None) -> nn.Sequential:
    """The RandBit projector: twice the representation's width, batch norm and ReLU, then half of it; no biases."""
    hidden, outputs = hidden or 2 * inputs, outputs or max(1, inputs // 2)
    head: Any = nn.Sequential(
        nn.Linear(inputs, hidden, bias=False),
        nn.BatchNorm1d(hidden, **KERAS),
        nn.ReLU(True),
        nn.Linear(hidden, outputs, bias=False),
    )
    head.width = outputs
    initialize_as_keras(head)
    return head


def initialize_as_keras(module: nn.Module) -> None:
    for m in module.modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(m.weight)
