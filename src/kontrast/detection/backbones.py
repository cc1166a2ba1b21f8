"""A ResNet as the backbone of a detector: with a feature pyramid (FPN), or up to its last stage but one (C4).

Images [N,3,H,W] -> feature maps by name, from the finest: FPN has one per stage and a coarser one, C4 has a single one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kontrast.errors import UsageError
from kontrast.networks.batch_norm import BatchNorm
from kontrast.networks.catalog import Module
from kontrast.probes.extract import evaluation_mode

PIXELS = 128
"""The side of the image by which channels and strides of the stages are measured."""


def stage_names(encoder: nn.Module) -> list[str]:
    """Return the names of the stages of a ResNet: layer1, layer2, ..."""
    names = [name for name, _ in encoder.named_children() if name.startswith("layer")]
    if len(names) < 2 or not hasattr(encoder, "conv1") or not hasattr(encoder, "bn1"):
        name = type(encoder).__name__
        raise UsageError(f"a detector needs a ResNet, not {name}: train with encoder.name=resnet-50, resnet-18 or ...")
    return names


def stage_shapes(encoder: nn.Module) -> list[tuple[int, int]]:
    """Return the channels and the stride of each stage."""
    from torchvision.models._utils import IntermediateLayerGetter

    names = stage_names(encoder)
    body = IntermediateLayerGetter(encoder, {name: name for name in names})
    weight: Any = next(encoder.parameters())
    if weight.shape[1] != 3:
        raise UsageError(f"a detector needs an encoder of color images, not of {weight.shape[1]} channels")
    with evaluation_mode(body), torch.no_grad():
        maps = body(torch.zeros(1, 3, PIXELS, PIXELS, device=weight.device, dtype=weight.dtype))
    return [(maps[name].shape[1], PIXELS // maps[name].shape[2]) for name in names]


def fpn_backbone(encoder: nn.Module, channels: int = 256, norm: bool = True) -> Any:
    """Return the encoder with a new feature pyramid on all of its stages; the encoder's own modules are used.

    Args:
        encoder: a ResNet.
        channels: the channels of every map of the pyramid; torchvision's detectors read them as `out_channels`.
        norm: batch norm in the pyramid.

    Shape:
        images [N,3,H,W], normalized -> maps "0", "1", ..., "pool", each [N,channels,H/stride,W/stride].

    Example:
        >>> from kontrast.networks import encoder
        >>> backbone = fpn_backbone(encoder("small-resnet", width=16), channels=8).eval()
        >>> [tuple(x.shape) for x in backbone(torch.zeros(1, 3, 64, 64)).values()]
        [(1, 8, 32, 32), (1, 8, 16, 16), (1, 8, 8, 8), (1, 8, 4, 4)]
    """
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

    names, shapes = stage_names(encoder), stage_shapes(encoder)
    kept = {name: str(i) for i, name in enumerate(names)}
    return BackboneWithFPN(encoder, kept, [c for c, _ in shapes], channels, norm_layer=nn.BatchNorm2d if norm else None)


def c4_backbone(encoder: nn.Module) -> Any:
    """Return the encoder up to its last stage but one, whose map is "0"; `out_channels` are its channels.

    Example:
        >>> from kontrast.networks import encoder
        >>> backbone = c4_backbone(encoder("small-resnet", width=16)).eval()
        >>> backbone(torch.zeros(1, 3, 64, 64))["0"].shape, backbone.out_channels
        (torch.Size([1, 8, 16, 16]), 8)
    """
    from torchvision.models._utils import IntermediateLayerGetter

    body: Any = IntermediateLayerGetter(encoder, {stage_names(encoder)[-2]: "0"})
    body.out_channels = stage_shapes(encoder)[-2][0]
    return body


class LastStageHead(nn.Module):
    """The last stage of a ResNet as the head of a C4 detector: [R,C,14,14] -> [R,F].

    Args:
        stage: the stage.
        width: its channels F.
        norm: batch norm after it.
    """

    def __init__(self, stage: nn.Module, width: int, norm: bool):
        super().__init__()
        self.stage, self.norm = stage, nn.BatchNorm2d(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stage(x)).mean(dim=(2, 3))


def freeze_batch_norm(module: Module) -> Module:
    """Replace every batch norm by fixed scales and shifts with its parameters and statistics, in place."""
    from torchvision.ops import FrozenBatchNorm2d

    if isinstance(module, BatchNorm):
        frozen: Any = FrozenBatchNorm2d(module.num_features, eps=module.eps)
        state = module.state_dict()
        frozen.load_state_dict({name: state[name] for name in frozen.state_dict()})
        return frozen
    for name, child in list(module.named_children()):
        module.add_module(name, freeze_batch_norm(child))
    return module
