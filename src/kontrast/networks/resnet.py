"""Residual networks with torchvision's parameter names, so that weights pass both ways.

N images, C channels, h x w pixels, F width. torchvision's own module is not used, because importing it takes seconds
(it imports torch's compiler) and its stem is not made for small images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import conv2d

from kontrast.networks.catalog import ENCODERS, register_sizes
from kontrast.networks.checks import check_choice, check_whole
from kontrast.networks.max_pool import MaxPool


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class ShortcutConvolution(nn.Conv2d):
    """A 1x1 convolution of every pixel, or of every second one in each direction.

    On CPUs oneDNN's gradient of such a convolution with a stride writes past its memory if there are fewer than 16
    input channels (oneDNN issue 6035), so there the pixels are chosen before it.
    """

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__(inputs, outputs, 1, stride, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or self.in_channels >= 16:
            return super().forward(input)
        return conv2d(input[:, :, :: self.stride[0], :: self.stride[1]], self.weight)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, planes, 3, stride), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = convolution(planes, planes, 3), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the 3x3 has the stride (ResNet v1.5)."""

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int):
        super().__init__()
        outputs = planes * self.expansion
        self.conv1, self.bn1 = convolution(inputs, planes, 1), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = convolution(planes, planes, 3, stride), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = convolution(planes, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(ShortcutConvolution(inputs, outputs, stride), nn.BatchNorm2d(outputs))


def automatic_stem(size: int) -> str:
    return "cifar" if size <= 64 else "imagenet"


class ResNet(nn.Module):
    """A residual network (He et al. 2015) without its classifier; the representation is the mean over positions.

    resnet-18 and resnet-34 have 8 and 16 basic blocks and a representation of width 512, resnet-50 and resnet-101 have
    16 and 33 bottlenecks and 2048. `depths` counts the blocks of each stage, `planes` its channels before the block's
    expansion.

    Args:
        stem: "cifar" (3x3, stride 1), "imagenet" (7x7, stride 2, max pooling), "small" (3x3, stride 2) or "auto":
            "cifar" up to 64 pixels, else "imagenet".
        zero_init: start every residual branch at zero.
    """

    def __init__(
        self, block: Any, depths: Sequence[int], planes: Sequence[int], *,
        channels: int = 3, size: int = 32, stem: str = "auto", zero_init: bool = False,
    ):  # fmt: skip
        super().__init__()
        stem = automatic_stem(size) if stem == "auto" else stem
        stems = {"cifar": (3, 1), "imagenet": (7, 2), "small": (3, 2)}
        check_choice("stem", stem, ("auto", *stems))
        self.conv1 = convolution(channels, planes[0], *stems[stem])
        self.bn1 = nn.BatchNorm2d(planes[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = MaxPool(3, 2, 1) if stem == "imagenet" else nn.Identity()
        inputs = planes[0]
        for i, (depth, width) in enumerate(zip(depths, planes)):
            blocks = []
            for j in range(depth):
                blocks.append(block(inputs, width, stride=2 if i > 0 and j == 0 else 1))
                inputs = width * block.expansion
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.stages = len(depths)
        self.width = inputs
        self.initialize(zero_init)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(self.stages):
            x = getattr(self, f"layer{i + 1}")(x)
        return x.mean(dim=(2, 3))

    def stem(self, x: Tensor) -> Tensor:
        """Return the input of the first block."""
        return self.maxpool(self.relu(self.bn1(self.conv1(x))))

    def initialize(self, zero_init: bool) -> None:
        """Draw He's normal weights by fan-out; with `zero_init` every residual branch starts at zero."""
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init and isinstance(m, BasicBlock | Bottleneck):
                nn.init.zeros_((m.bn3 if isinstance(m, Bottleneck) else m.bn2).weight)


STAGES = (64, 128, 256, 512)
register_sizes(
    ResNet,
    {
        "resnet-18": (BasicBlock, (2, 2, 2, 2), STAGES),
        "resnet-34": (BasicBlock, (3, 4, 6, 3), STAGES),
        "resnet-50": (Bottleneck, (3, 4, 6, 3), STAGES),
        "resnet-101": (Bottleneck, (3, 4, 23, 3), STAGES),
    },
)


@ENCODERS.register("small-resnet")
def small_resnet(channels: int = 3, size: int = 32, width: int = 128, depth: int = 1, stem: str = "small") -> ResNet:
    """A ResNet for small images on a CPU, with three stages of width/4, width/2 and width planes.

    Args:
        width: width of the representation, a multiple of 4.
        depth: residual blocks per stage, at most 1000.
        stem: as for the other ResNets.
    """
    check_whole("width", width, multiple=4)
    depths = (check_whole("depth", depth, most=1000),) * 3
    planes = (width // 4, width // 2, width)
    return ResNet(BasicBlock, depths, planes, channels=channels, size=size, stem=stem)
