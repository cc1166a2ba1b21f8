"""A four-layer strided convolution: the quickest encoder that learns something on a CPU. [N,C,h,w] -> [N,width]."""

from __future__ import annotations

from torch import Tensor, nn

from kontrast.networks.catalog import ENCODERS
from kontrast.networks.checks import check_whole


@ENCODERS.register("small-conv")
class SmallConv(nn.Module):
    """Four 3x3 convolutions of stride 2 with batch norm and ReLU, then the mean over positions.

    Args:
        width: width of the representation, a multiple of 8. The layers have width/8, width/4, width/2 and width
            channels.
    """

    def __init__(self, channels: int = 3, size: int = 32, width: int = 256):
        super().__init__()
        check_whole("width", width, multiple=8)
        layers: list[nn.Module] = []
        inputs = channels
        for outputs in (width // 8, width // 4, width // 2, width):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(dim=(2, 3))
