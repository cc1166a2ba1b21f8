"""Detectors on a run's encoder: Faster, Mask and Keypoint R-CNN, their protocols, and average precision."""

from kontrast.detection.average_precision import average_precision, voc_scores
from kontrast.detection.backbones import c4_backbone, fpn_backbone
from kontrast.detection.coco_metrics import coco_scores
from kontrast.detection.detections import Detections
from kontrast.detection.detectors import build_detector
from kontrast.detection.protocol_files import DetectionProtocol, detection_protocol, protocol_names

__all__ = [
    "DetectionProtocol", "Detections", "average_precision", "build_detector", "c4_backbone", "coco_scores",
    "detection_protocol", "fpn_backbone", "protocol_names", "voc_scores",
]  # fmt: skip
