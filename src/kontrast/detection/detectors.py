"""Faster, Mask and Keypoint R-CNN of torchvision on an encoder, as a protocol says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from kontrast.detection.backbones import (  # fmt: skip
    LastStageHead,
    c4_backbone,
    fpn_backbone,
    freeze_batch_norm,
    stage_names,
    stage_shapes,
)
from kontrast.detection.protocol_files import DetectionProtocol
from kontrast.networks import synchronize_batch_norm

RATIOS = (0.5, 1.0, 2.0)
C4_SIZES = (4.0, 8.0, 16.0, 32.0, 64.0)
"""A C4 detector has all sizes of anchors on its only map: these multiples of `anchor_scale`."""


def build_detector(
    encoder: nn.Module,
    classes: int,
    protocol: DetectionProtocol,
    *,
    task: str = "boxes",
    keypoints: int = 0,
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[float] = (0.229, 0.224, 0.225),
) -> Any:
    """Return a detector of torchvision that owns the encoder; what the encoder doesn't have begins at random.

    Args:
        encoder: a ResNet. Its modules become the detector's, so give a copy to keep it.
        classes: the number of classes C.
        protocol: neck, batch norm, sizes of images, anchors and heads.
        task: "boxes" (Faster R-CNN), "masks" (Mask R-CNN) or "keypoints" (Keypoint R-CNN).
        keypoints: the number of keypoints of an object, for the task "keypoints".
        mean: the mean of the color channels that the encoder expects.
        std: their standard deviation.

    Shape:
        a list of images [3,H,W] from 0 to 1 -> in training a dict of losses, else a list of dicts with boxes, labels
        (from 1), scores and masks or keypoints.

    Example:
        >>> from kontrast.detection import detection_protocol
        >>> from kontrast.networks import encoder
        >>> model = build_detector(encoder("small-resnet", width=16), 10, detection_protocol("canvases"))
        >>> type(model).__name__
        'FasterRCNN'
    """
    from torchvision.models.detection.faster_rcnn import FasterRCNN
    from torchvision.models.detection.keypoint_rcnn import KeypointRCNN
    from torchvision.models.detection.mask_rcnn import MaskRCNN

    kinds: dict[str, Any] = {"boxes": FasterRCNN, "masks": MaskRCNN, "keypoints": KeypointRCNN}
    if protocol.norm == "frozen":
        encoder = freeze_batch_norm(encoder)
    parts_of = {"fpn": _fpn_parts, "c4": _c4_parts}[protocol.neck]
    many, before = protocol.proposals, 1 if protocol.neck == "fpn" else 6  # a pyramid proposes on each of its maps
    model = kinds[task](
        **parts_of(encoder, protocol, task, classes, keypoints),
        min_size=protocol.test_side, max_size=protocol.longest, image_mean=list(mean), image_std=list(std),
        rpn_pre_nms_top_n_train=2 * before * many, rpn_pre_nms_top_n_test=before * many,
        rpn_post_nms_top_n_train=2 * many, rpn_post_nms_top_n_test=many,
        box_detections_per_img=protocol.detections, box_batch_size_per_image=protocol.regions,
    )  # fmt: skip
    for stage in ("conv1", "bn1", *stage_names(encoder))[: protocol.frozen_stages and protocol.frozen_stages + 1]:
        getattr(encoder, stage).requires_grad_(False)
    return synchronize_batch_norm(model) if protocol.norm == "sync" else model


def set_mode(model: Any, protocol: DetectionProtocol, training: bool) -> None:
    """Put a detector into training or evaluation mode, with the sizes of images of that mode: torchvision itself would
    also train on the size for tests."""
    sides = protocol.short_sides if training else (protocol.test_side,)
    model.transform.min_size = tuple(int(side) for side in sides)
    model.train(training)


def _fpn_parts(
    encoder: nn.Module, protocol: DetectionProtocol, task: str, classes: int, keypoints: int
) -> dict[str, Any]:
    """Return the parts of a detector with a feature pyramid. Every map has one size of anchors, a multiple of its
    stride."""
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.ops import MultiScaleRoIAlign

    shapes = stage_shapes(encoder)
    strides = [stride for _, stride in shapes] + [2 * shapes[-1][1]]
    sizes = tuple((round(protocol.anchor_scale * stride),) for stride in strides)
    levels, width = [str(i) for i in range(len(shapes))], protocol.channels
    backbone = fpn_backbone(encoder, width, protocol.neck_norm)
    parts: dict[str, Any] = {
        "backbone": backbone,
        "rpn_anchor_generator": AnchorGenerator(sizes, (RATIOS,) * len(sizes)),
        "box_roi_pool": MultiScaleRoIAlign(levels, 7, 2),
        "box_head": TwoMLPHead(width * 49, protocol.head_width),
        "box_predictor": FastRCNNPredictor(protocol.head_width, classes + 1),
    }
    if task == "masks":
        from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

        parts["mask_roi_pool"] = MultiScaleRoIAlign(levels, 14, 2)
        parts["mask_head"] = MaskRCNNHeads(width, (width,) * protocol.mask_layers, 1)
        parts["mask_predictor"] = MaskRCNNPredictor(width, width, classes + 1)
    if task == "keypoints":
        from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor

        parts["keypoint_roi_pool"] = MultiScaleRoIAlign(levels, 14, 2)
        parts["keypoint_head"] = KeypointRCNNHeads(width, (2 * width,) * protocol.keypoint_layers)
        parts["keypoint_predictor"] = KeypointRCNNPredictor(2 * width, keypoints)
    return parts


def _c4_parts(
    encoder: nn.Module, protocol: DetectionProtocol, task: str, classes: int, keypoints: int
) -> dict[str, Any]:
    """Return the parts of a detector whose heads share the encoder's last stage; it proposes on the stage before."""
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
    from torchvision.ops import MultiScaleRoIAlign

    width = stage_shapes(encoder)[-1][0]
    stage = getattr(encoder, stage_names(encoder)[-1])
    backbone = c4_backbone(encoder)
    sizes = tuple(round(protocol.anchor_scale * multiple) for multiple in C4_SIZES)
    parts: dict[str, Any] = {
        "backbone": backbone,
        "rpn_anchor_generator": AnchorGenerator((sizes,), (RATIOS,)),
        "box_roi_pool": MultiScaleRoIAlign(["0"], 14, 0),
        "box_head": LastStageHead(stage, width, protocol.neck_norm),
        "box_predictor": FastRCNNPredictor(width, classes + 1),
    }
    if task == "masks":
        from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor

        parts["mask_roi_pool"] = MultiScaleRoIAlign(["0"], 14, 0)
        parts["mask_head"] = stage  # the same stage as the boxes have
        parts["mask_predictor"] = MaskRCNNPredictor(width, 256, classes + 1)
    if task == "keypoints":
        from torchvision.models.detection.keypoint_rcnn import KeypointRCNNPredictor

        parts["keypoint_roi_pool"] = MultiScaleRoIAlign(["0"], 14, 0)
        parts["keypoint_head"] = stage
        parts["keypoint_predictor"] = KeypointRCNNPredictor(width, keypoints)
    return parts
