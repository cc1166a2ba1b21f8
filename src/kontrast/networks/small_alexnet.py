"""SmallAlexNet, the encoder of align-uniform and CACR. [N,C,h,w] -> fc7 [N,4096], the layer those papers evaluate."""

from __future__ import annotations

from torch import Tensor, nn

from kontrast.networks.catalog import ENCODERS
from kontrast.networks.checks import check_whole
from kontrast.networks.max_pool import MaxPool


@ENCODERS.register("small-alexnet")
class SmallAlexNet(nn.Module):
    """SmallAlexNet up to its layer fc7, for images of 15 pixels or more; the head "fc8" is its last layer.

    Five 3x3 convolutions of 96, 192, 384, 384 and 192 channels with max pooling after the first, second and fifth, then
    two fully connected layers of 4096. Batch norm and ReLU after each, no biases, weights from N(0, 0.02).
    """

    def __init__(self, channels: int = 3, size: int = 32):
        super().__init__()
        check_whole("size", size, least=15)  # three poolings of width 3 and stride 2 leave one position
        blocks: list[nn.Module] = []
        inputs, side = channels, size
        for outputs, pooled in ((96, True), (192, True), (384, False), (384, False), (192, True)):
            blocks += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
            if pooled:
                blocks.append(MaxPool(3, 2))
                side = (side - 3) // 2 + 1
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc6 = nn.Sequential(nn.Linear(inputs * side**2, 4096, bias=False), nn.BatchNorm1d(4096), nn.ReLU(True))
        self.fc7 = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.BatchNorm1d(4096), nn.ReLU(True))
        self.width = 4096
        for m in self.modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(m.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc7(self.fc6(self.blocks(x).flatten(1)))
