"""COCO's average precision, by the package faster-coco-eval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kontrast.data.annotated.annotated_images import AnnotatedImages
from kontrast.data.annotated.coco_files import coco_tree
from kontrast.data.annotated.mask_codes import text_of_runs
from kontrast.detection.detections import Detections
from kontrast.errors import EnvironmentFault

KINDS = {"boxes": "bbox", "masks": "segm", "keypoints": "keypoints"}
NAMES = ("AP", "AP50", "AP75")


def check_coco_package() -> None:
    """Raise if faster-coco-eval is not installed, before hours of training rather than after them."""
    try:
        import faster_coco_eval  # noqa: F401
    except ImportError:
        advice = "pip install kontrast[coco], or use metric=voc, which needs nothing"
        raise EnvironmentFault(f"metric=coco needs faster-coco-eval: {advice}") from None


def coco_scores(found: Sequence[Detections], images: AnnotatedImages, *, task: str = "boxes") -> dict[str, Any]:
    """Return COCO's AP, AP50 and AP75, in 0..1, and AP50 by label under "classes".

    Args:
        found: the detections of each image.
        images: the annotated images, in the same order.
        task: "boxes", "masks" or "keypoints".
    """
    check_coco_package()
    from faster_coco_eval import COCO, COCOeval_faster

    truth = coco_tree(images, masks=task != "boxes")
    if not any(map(len, found)):
        return {**dict.fromkeys(NAMES, 0.0), "classes": {}}
    known = COCO(truth)
    kind: Any = KINDS[task]
    sigmas = list(images.keypoints.sigmas) if task == "keypoints" and images.keypoints else None
    job: Any = COCOeval_faster(known, known.loadRes(coco_results(found, task)), kind, kpt_oks_sigmas=sigmas)
    job.evaluate()
    job.accumulate()
    precision = job.eval["precision"][:, :, :, 0, -1]  # thresholds, recalls, classes; all sizes, most detections

    def mean(values: np.ndarray) -> float:
        return float(values[values > -1].mean()) if (values > -1).any() else 0.0

    numbers = [category - 1 for category in job.params.catIds]
    classes = {i: mean(precision[0, :, k]) for k, i in enumerate(numbers) if (precision[0, :, k] > -1).any()}
    return {"AP": mean(precision), "AP50": mean(precision[0]), "AP75": mean(precision[5]), "classes": classes}


def coco_results(found: Sequence[Detections], task: str = "boxes") -> list[dict[str, Any]]:
    """Return detections as COCO's table of results; ids count from 1."""
    rows = []
    for image, one in enumerate(found, 1):
        sides = one.boxes.double()
        sides[:, 2:] -= sides[:, :2].clone()
        for k in range(len(one)):
            row: dict[str, Any] = {"image_id": image, "category_id": int(one.labels[k]) + 1}
            row |= {"bbox": sides[k].tolist(), "score": float(one.scores[k])}
            if task == "masks" and one.masks is not None:
                row["segmentation"] = {"size": [one.height, one.width], "counts": text_of_runs(one.masks[k])}
            if task == "keypoints" and one.keypoints is not None:
                row["keypoints"] = one.keypoints[k].flatten().tolist()
            rows.append(row)
    return rows
