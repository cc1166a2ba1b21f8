"""Average precision: VOC's by hand, COCO's against pycocotools, and both on cases whose answer is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kontrast import detection
from kontrast.data.annotated import AnnotatedImages, canvas_objects
from kontrast.data.annotated.coco_files import coco_tree
from kontrast.data.annotated.mask_codes import run_lengths
from kontrast.data.annotated.objects import Objects
from kontrast.detection import Detections, average_precision, coco_scores, voc_scores
from kontrast.detection.coco_metrics import coco_results
from kontrast.probes.classification_metrics import area_of_curve
from kontrast.runs.detector_training import read_truth

from support.doctests import run_examples


def boxes(*rows):
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 4)


def truth(rows, labels, ignored=None):
    hard = torch.tensor(ignored or [False] * len(rows), dtype=torch.bool)
    return Objects(boxes(*rows), torch.tensor(labels, dtype=torch.int64), hard)


def found(rows, labels, scores):
    return Detections(boxes(*rows), torch.tensor(labels, dtype=torch.int64), torch.tensor(scores), 100, 100)


A, B, C, FAR = [0, 0, 10, 10], [20, 0, 30, 10], [0, 20, 10, 30], [50, 50, 60, 60]


def test_voc_ap50_of_a_hand_computed_example():
    """Two images, one class, three objects and a difficult one.

    By score: right (A), twice the same object (wrong), the difficult one (doesn't count), right (B), nothing there
    (wrong). Precisions: 1, 1/2, 2/3, 2/4; recalls: 1/3, 1/3, 2/3, 2/3. Area: 1/3 x 1 + 1/3 x 2/3 = 5/9. Eleven points:
    recalls 0 to 0.3 have 1, 0.4 to 0.6 have 2/3, the rest 0: (4 + 3 x 2/3) / 11 = 6/11.
    """
    objects = [truth([A, FAR], [0, 0], [False, True]), truth([B, C], [0, 0])]
    shifted = [0, 0, 10, 8]  # overlaps A by 0.8
    seen = [found([A, shifted, FAR], [0, 0, 0], [0.9, 0.8, 0.7]), found([B, FAR], [0, 0], [0.6, 0.5])]
    assert average_precision(seen, objects)[0] == pytest.approx(5 / 9)
    assert average_precision(seen, objects, points="11")[0] == pytest.approx(6 / 11)
    scores = voc_scores(seen, objects)
    assert scores["AP50"] == pytest.approx(5 / 9) and scores["AP50 (11 points)"] == pytest.approx(6 / 11)
    assert scores["AP"] == pytest.approx(5 / 9) and scores["AP75"] == pytest.approx(5 / 9)


def test_an_overlap_of_exactly_the_threshold_counts_and_one_below_does_not():
    objects = [truth([[0, 0, 10, 10]], [0])]
    assert average_precision([found([[0, 0, 10, 5]], [0], [0.9])], objects)[0] == 1
    assert average_precision([found([[0, 0, 10, 4.99]], [0], [0.9])], objects)[0] == 0


def test_classes_are_apart_and_classes_without_objects_do_not_count():
    objects = [truth([A, B], [0, 1])]
    seen = [found([A, B, C], [1, 1, 2], [0.9, 0.8, 0.7])]
    assert average_precision(seen, objects) == {0: 0.0, 1: 0.5}


def test_detections_inside_a_crowd_count_neither_as_hits_nor_as_misses():
    """COCO compares a detection with a crowd by its own area: a tenth of the crowd is enough."""
    crowd = Objects(boxes(A, [20, 20, 90, 90]), torch.tensor([0, 0]), torch.tensor([False, True]))
    crowd = dataclasses.replace(crowd, crowds=crowd.ignored)
    seen = [found([[30, 30, 40, 40], [40, 30, 50, 40], A], [0, 0, 0], [0.9, 0.8, 0.7])]
    assert average_precision(seen, [crowd])[0] == 1
    inside = dataclasses.replace(crowd, boxes=boxes(A, [0, 0, 50, 50]))
    assert average_precision([found([A], [0], [0.9])], [inside])[0] == 1  # the object comes before the crowd around it
    masks = torch.zeros(2, 100, 100, dtype=torch.bool)
    masks[0, :10, :10] = masks[1, 20:90, 20:90] = True
    part = torch.zeros(100, 100, dtype=torch.bool)
    part[30:40, 30:40] = True
    coded = [run_lengths(part.numpy()), run_lengths(masks[0].numpy())]
    two = Detections(boxes([30, 30, 40, 40], A), torch.tensor([0, 0]), torch.tensor([0.9, 0.8]), 100, 100, coded)
    assert average_precision([two], [dataclasses.replace(crowd, masks=masks)], task="masks")[0] == 1


def test_objects_without_keypoints_count_neither_as_hits_nor_as_misses():
    points = torch.zeros(2, 1, 3)
    points[0, 0] = torch.tensor([5.0, 5.0, 2.0])
    objects = dataclasses.replace(truth([A, FAR], [0, 0]), keypoints=points)
    images = AnnotatedImages(["a"], ("person",), lambda i: torch.zeros(3, 100, 100), lambda i, masks: objects)
    seen = found([A, FAR], [0, 0], [0.8, 0.9])
    seen = dataclasses.replace(seen, keypoints=torch.tensor([[[5.0, 5.0, 1.0]], [[55.0, 52.0, 1.0]]]))
    assert voc_scores([seen], read_truth(images, "keypoints"), task="keypoints", sigmas=(0.05,))["AP"] == 1


def test_no_detections_and_no_objects():
    assert average_precision([found([], [], [])], [truth([A], [0])]) == {0: 0.0}
    assert voc_scores([found([A], [0], [0.5])], [truth([], [])])["AP50"] == 0
    assert area_of_curve(np.zeros(0, dtype=bool), 3) == 0


def noisy(task, seed=0, images=24):
    """Annotated canvases with a crowd among them, and detections near the objects, with misses and false ones."""
    rng = np.random.default_rng(seed)
    some = canvas_objects("test").subset(range(images))
    seen = []
    for i in range(images):
        objects = some.objects(i, True)
        keep = torch.from_numpy(rng.random(len(objects)) < 0.85)
        good = objects.take(keep)
        count = len(good) + 2
        noise = torch.from_numpy(rng.normal(0, 1.5, (len(good), 4))).float()
        sides = torch.cat([good.boxes + noise, boxes([5, 5, 20, 20], [40, 30, 60, 60])])
        sides[:, 2:] = torch.maximum(sides[:, 2:], sides[:, :2] + 1)
        labels = torch.cat([good.labels, torch.tensor([0, 1])])
        labels[torch.from_numpy(rng.random(count) < 0.1)] = 3
        masks = torch.zeros(count, 96, 96, dtype=torch.bool)
        shares = rng.uniform(0.4, 1, (len(good), 1, 1))
        masks[: len(good)] = good.masks & torch.from_numpy(rng.random(good.masks.shape) < shares)
        masks[len(good) :, 5:20, 5:20] = True
        points = torch.zeros(count, 4, 3)
        points[: len(good)] = good.keypoints + torch.from_numpy(rng.normal(0, 0.7, good.keypoints.shape)).float()
        points[:, :, 2] = 1
        scores = torch.from_numpy(rng.random(count)).float()
        coded = [run_lengths(mask.numpy()) for mask in masks]
        seen.append(Detections(sides, labels, scores, 96, 96, coded, points))
    return some, seen


def with_crowds(images):
    def objects(i, masks):
        one = images.objects(i, masks)
        crowds = torch.arange(len(one)) == (4 if i % 3 else 0)
        return dataclasses.replace(one, ignored=crowds, crowds=crowds)

    return dataclasses.replace(images, objects=objects)


@pytest.mark.parametrize("task", ["boxes", "masks", "keypoints"])
def test_coco_scores_are_those_of_pycocotools(task):
    pytest.importorskip("faster_coco_eval", reason="faster-coco-eval is not installed")
    reference = pytest.importorskip("pycocotools.cocoeval", reason="pycocotools is not installed")
    coco = pytest.importorskip("pycocotools.coco")
    images, seen = noisy(task)
    images = with_crowds(images)
    scores = coco_scores(seen, images, task=task)
    known = coco.COCO()
    known.dataset = coco_tree(images)
    known.createIndex()
    job = reference.COCOeval(known, known.loadRes(coco_results(seen, task)),
                             {"boxes": "bbox", "masks": "segm", "keypoints": "keypoints"}[task])  # fmt: skip
    job.params.kpt_oks_sigmas = np.array(images.keypoints.sigmas)
    job.evaluate()
    job.accumulate()
    job.summarize()
    assert [scores["AP"], scores["AP50"], scores["AP75"]] == pytest.approx(job.stats[:3].tolist(), abs=1e-12)
    assert 0.1 < scores["AP75"] < scores["AP50"] < 0.95  # neither trivially right nor wrong


@pytest.mark.parametrize("task", ["boxes", "masks", "keypoints"])
def test_vocs_scores_are_close_to_cocos_where_both_are_defined(task):
    """They differ in the points of the curve and in which object a detection takes, not in what an overlap is."""
    pytest.importorskip("faster_coco_eval", reason="faster-coco-eval is not installed")
    images, seen = noisy(task, images=64)
    images = with_crowds(images)
    objects = [images.objects(i, True) for i in range(len(images))]
    ours = voc_scores(seen, objects, task=task, sigmas=images.keypoints.sigmas)
    theirs = coco_scores(seen, images, task=task)
    for key in ("AP", "AP50", "AP75"):
        assert ours[key] == pytest.approx(theirs[key], abs=0.02)


@pytest.mark.parametrize("name", ["average_precision", "voc_scores", "Detections", "fpn_backbone", "c4_backbone",
                                  "build_detector", "protocol_names", "detection_protocol",
                                  "DetectionProtocol"])  # fmt: skip
def test_examples(name):
    run_examples(getattr(detection, name))
