"""Boxes, masks and keypoints follow flips, resizes and crops, for any boxes and images."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kontrast.data import annotated
from kontrast.data.annotated import Objects, crop, flip, resize
from kontrast.data.annotated.objects import boxes_of_masks

from support.doctests import run_examples

quick = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def scenes(draw):
    """An image whose first channel numbers its rows and columns, with filled rectangles as objects."""
    height, width = draw(st.integers(4, 24)), draw(st.integers(4, 24))
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
        boxes.append([left, top, draw(st.integers(left + 1, width)), draw(st.integers(top + 1, height))])
    masks = torch.zeros(len(boxes), height, width, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes):
        mask[top:bottom, left:right] = True
    # The keypoints are the centers of the upper left and upper right pixels; the third one is not annotated.
    points = torch.tensor([[[b[0] + 0.5, b[1] + 0.5, 2], [b[2] - 0.5, b[1] + 0.5, 1], [0, 0, 0]] for b in boxes])
    image = (torch.arange(height)[:, None] * 8 + torch.arange(width)).expand(3, height, width).to(torch.float32)
    count = len(boxes)
    ignored = torch.zeros(count, dtype=torch.bool)
    return image, Objects(torch.tensor(boxes).float(), torch.arange(count), ignored, masks, points.float())


@quick
@given(scenes())
def test_flip(scene):
    image, objects = scene
    mirrored, found = flip(image, objects, (1, 0, 2))
    assert torch.equal(boxes_of_masks(found.masks), found.boxes)
    for k in range(len(objects)):  # the pixels of a box are those of the box before, mirrored
        left, top, right, bottom = objects.boxes[k].int().tolist()
        a, b, c, d = found.boxes[k].int().tolist()
        assert torch.equal(mirrored[:, b:d, a:c], image[:, top:bottom, left:right].flip(2))
        upper_left = found.keypoints[k, 0]
        assert upper_left.tolist() == [a + 0.5, b + 0.5, 1]  # it was the upper right one, which was hidden
        assert found.keypoints[k, 2].tolist() == [0, 0, 0]
    again, back = flip(mirrored, found, (1, 0, 2))
    assert torch.equal(again, image)
    for field in dataclasses.fields(Objects):
        before, after = getattr(objects, field.name), getattr(back, field.name)
        assert before is after is None or torch.equal(before, after)


@quick
@given(scenes(), st.integers(1, 4), st.integers(1, 4))
def test_resize_by_whole_factors(scene, down, across):
    image, objects = scene
    height, width = image.shape[1:]
    larger, found = resize(image, objects, height * down, width * across)
    assert larger.shape == (3, height * down, width * across)
    assert torch.equal(boxes_of_masks(found.masks), found.boxes)
    assert torch.equal(found.keypoints[:, 0, :2], objects.keypoints[:, 0, :2] * torch.tensor([across, down]))
    assert torch.equal(found.masks.flatten(1).sum(1), objects.masks.flatten(1).sum(1) * down * across)


@quick
@given(scenes(), st.integers(2, 40), st.integers(2, 40))
def test_boxes_stay_around_their_masks_at_any_size(scene, height, width):
    image, objects = scene
    _, found = resize(image, objects, height, width)
    for box, mask in zip(found.boxes, found.masks):
        if mask.any():
            assert (boxes_of_masks(mask[None])[0] - box).abs().max() <= 0.5 + 1e-4  # at most half a pixel of rounding


@quick
@given(scenes(), st.data())
def test_crop(scene, data):
    image, objects = scene
    height, width = image.shape[1:]
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    high, wide = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    window, found = crop(image, objects, top, left, high, wide)
    assert torch.equal(window, image[:, top : top + high, left : left + wide])
    assert torch.equal(boxes_of_masks(found.masks), found.boxes)
    kept = set(found.labels.tolist())
    for k, mask in enumerate(objects.masks[:, top : top + high, left : left + wide]):
        assert (k in kept) == bool(mask.any())
    for k, points in zip(found.labels.tolist(), found.keypoints):
        before = objects.keypoints[k]
        for point, old in zip(points, before):
            inside = left <= old[0] <= left + wide and top <= old[1] <= top + high and old[2] > 0
            assert point.tolist() == ([old[0] - left, old[1] - top, old[2]] if inside else [0, 0, 0])


@quick
@given(scenes(), st.floats(0.05, 0.95))
def test_crop_leaves_out_objects_of_which_little_is_left(scene, least):
    image, objects = scene
    half = image.shape[2] // 2
    _, found = crop(image, objects, 0, 0, image.shape[1], half, least)
    left, _, right, _ = objects.boxes.T
    shares = (right.clamp(max=half) - left).clamp(min=0) / (right - left)
    assert found.labels.tolist() == np.flatnonzero((shares > least).numpy()).tolist()


@pytest.mark.parametrize("name", ["Objects", "canvas_objects", "crop", "flip", "open_annotated", "resize", "write_coco",
                                  "write_voc"])  # fmt: skip
def test_examples(name):
    run_examples(getattr(annotated, name))
