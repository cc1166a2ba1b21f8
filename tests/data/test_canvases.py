"""The embedded canvases: exact boxes, masks and keypoints, no shared scans, the same pixels every time."""

from __future__ import annotations

import hashlib

import torch

from kontrast.data import open_data
from kontrast.data.annotated import canvas_objects
from kontrast.data.annotated.canvases import ENDS, _draw
from kontrast.data.annotated.objects import boxes_of_masks


def test_boxes_are_the_bounds_of_masks_and_keypoints_lie_on_their_sides():
    images = canvas_objects("test")
    for i in range(0, len(images), 16):
        pixels, found = images.read(i, masks=True)
        assert pixels.dtype == torch.uint8 and pixels.shape == (3, 96, 96) == (3, *found.masks.shape[1:])
        assert 1 <= len(found) <= 5 and not found.ignored.any()
        for box, mask, points in zip(found.boxes, found.masks, found.keypoints):
            rows, columns = mask.nonzero().unbind(1)
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            left, top, right, bottom = box
            named = dict(zip(ENDS.names, points.tolist()))
            assert named["top"][1] == top + 0.5 and named["bottom"][1] == bottom - 0.5
            assert named["left"][0] == left + 0.5 and named["right"][0] == right - 0.5


def test_a_mask_is_where_the_digit_differs_from_the_picture_around_it():
    """Half covered pixels are at least half way from the background to the digit, and others are nearer to it."""
    images = canvas_objects("test")
    pixels, found = images.read(3, masks=True)
    around = pixels[:, ~found.masks.any(0)].float()
    for mask in found.masks:
        inside = pixels[:, mask].float()
        near = (inside - around.median(1).values[:, None]).norm(dim=0)
        assert near.median() > 3 * around.std(1).norm()


def test_digits_of_an_image_do_not_touch():
    images = canvas_objects("test")
    for i in range(0, len(images), 16):
        masks = images.objects(i, True).masks
        grown = torch.nn.functional.max_pool2d(masks[None].float(), 3, 1, 1)[0]
        assert grown.sum(0).max() <= 1


def test_train_and_test_share_no_image_and_are_the_same_in_every_process():
    train, test = open_data("canvases", "train"), open_data("canvases", "test")
    assert (len(train), len(test)) == (1024, 256) and train.labels is None
    assert hashlib.sha256(test.images.numpy().tobytes()).hexdigest()[:16] == "4acf2f8efc180172"
    objects = _draw("test")[1]
    assert sum(map(len, objects)) == 931 and len({int(x) for o in objects for x in o.labels}) == 10


def test_bounds_of_masks():
    masks = torch.zeros(2, 5, 7, dtype=torch.bool)
    masks[0, 1, 2], masks[1, 0:5, 6] = True, True
    assert boxes_of_masks(masks).tolist() == [[2, 1, 3, 2], [6, 0, 7, 5]]


def test_a_larger_share_of_the_same_seed_contains_the_smaller_one():
    images = canvas_objects("test")
    small, large, other = images.share(0.1, 0), images.share(0.3, 0), images.share(0.1, 1)
    assert (len(small), len(large)) == (26, 77) and set(small.names) < set(large.names)
    assert set(small.names) != set(other.names)
    assert torch.equal(small.pixels(3), images.pixels(list(images.names).index(small.names[3])))
