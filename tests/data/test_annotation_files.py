"""COCO JSON and VOC XML: what is written is read back, and bad annotations are listed with their reasons."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kontrast.data.annotated import canvas_objects, open_annotated, write_coco, write_voc
from kontrast.data.annotated.mask_codes import (  # fmt: skip
    decode_mask,
    mask_of_polygon,
    mask_of_runs,
    run_lengths,
    runs_of_text,
    text_of_runs,
)
from kontrast.errors import DataError

quick = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """The first images of the canvases as a COCO and a VOC folder."""
    place = tmp_path_factory.mktemp("layouts")
    train, test = canvas_objects("train").subset(range(6)), canvas_objects("test").subset(range(4))
    for part in (train, test):
        write_coco(part, place / "coco")
    write_voc(train, place / "voc", [test])
    return place, {"train": train, "test": test}


def assert_same(one, other, fields):
    for name in fields:
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("split", ["train", "test"])
def test_coco_reads_back_what_was_written(layouts, split):
    place, parts = layouts
    read = open_annotated(place / "coco", split, "keypoints")
    assert len(read) == len(parts[split]) and read.has_masks and not read.bad and read.classes == tuple("0123456789")
    assert read.keypoints.names == ("top", "bottom", "left", "right") and read.keypoints.mirrored == (0, 1, 3, 2)
    for i in range(len(read)):
        pixels, found = read.read(i, masks=True)
        before, objects = parts[split].read(i, masks=True)
        assert torch.equal(pixels, before)
        assert_same(found, objects, ("boxes", "labels", "ignored", "masks", "keypoints", "stated"))
        assert torch.equal(found.stated, objects.masks.flatten(1).sum(1).float())


@pytest.mark.parametrize("split", ["train", "test"])
def test_voc_reads_back_what_was_written(layouts, split):
    place, parts = layouts
    read = open_annotated(place / "voc", split)
    assert len(read) == len(parts[split]) and not read.bad and not read.has_masks
    for i in range(len(read)):
        pixels, found = read.read(i)
        before, objects = parts[split].read(i)
        assert torch.equal(pixels, before) and torch.equal(found.boxes, objects.boxes)
        assert [read.classes[x] for x in found.labels] == [str(int(x)) for x in objects.labels]


def made_coco(folder, annotations, images=({"id": 7, "file_name": "a.png", "height": 10, "width": 20},), points=None):
    (folder / "annotations").mkdir(parents=True)
    (folder / "train2017").mkdir()
    Image.new("RGB", (20, 10)).save(folder / "train2017" / "a.png")
    categories = [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person", **(points or {})}]
    tree = {"images": list(images), "annotations": annotations, "categories": categories}
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(tree))
    return folder


BAD = {
    "without area": {"bbox": [1, 1, 0, 3]},
    "not four numbers": {"bbox": [1, 1, "x", 3]},
    "outside of the image": {"bbox": [25, 1, 3, 3]},
    "unknown category": {"bbox": [1, 1, 2, 2], "category_id": 5},
    "image is not listed": {"bbox": [1, 1, 2, 2], "image_id": 8},
    "fewer than three corners": {"bbox": [1, 1, 2, 2], "segmentation": [[1, 2, 3, 4]]},
    "don't add up": {"bbox": [1, 1, 2, 2], "segmentation": {"size": [10, 20], "counts": [3, 4]}},
    "a mask of size": {"bbox": [1, 1, 2, 2], "segmentation": {"size": [20, 10], "counts": [200]}},
    "keypoints that are not": {"bbox": [1, 1, 2, 2], "keypoints": [1, 2]},
    "unknown category [": {"bbox": [1, 1, 2, 2], "category_id": [1]},
    "not listed or": {"bbox": [1, 1, 2, 2], "image_id": {}},
}


def test_bad_coco_annotations_are_listed_with_their_reasons(tmp_path):
    good = {"id": 0, "image_id": 7, "category_id": 90, "bbox": [2, 3, 30, 4], "iscrowd": 1}
    rows = [{**good, "id": i, "iscrowd": 0, **change} for i, change in enumerate(BAD.values(), 1)]
    images = [{"id": 7, "file_name": "a.png", "height": 10, "width": 20}]
    images += [{"id": 9, "file_name": "../a.png", "height": 10, "width": 20}]
    images += [{"id": 10, "file_name": "missing.png", "height": 10, "width": 20}, {"id": 11, "file_name": "a.png"}]
    points = {"keypoints": ["head", "foot"]}
    read = open_annotated(made_coco(tmp_path / "coco", [good, *rows, None], images, points), "train")
    reasons = dict(read.bad)
    for i, reason in enumerate(BAD, 1):
        assert reason in reasons[f"annotation {i}"]
    assert "leads out" in reasons["../a.png"] and "No such file" in reasons["missing.png"]
    assert "without height" in reasons["a.png"] and len(read.bad) == len(BAD) + 4
    found = read.objects(0, False)
    assert found.boxes.tolist() == [[2, 3, 20, 7]] and found.ignored.tolist() == [True]
    assert read.classes == ("person", "toothbrush") and found.labels.tolist() == [1]
    assert "left out 15 bad images or annotations" in read.skipped() and "1 boxes cut to their image" in read.skipped()


def test_images_of_another_size_than_their_annotations_are_left_out(tmp_path):
    """Also if only the orientation differs, and if EXIF data turn the image."""
    names = ("a.png", "turned.jpg", "turned.png", "turned.tif", "flat.jpg")
    images = [{"id": i, "file_name": name, "height": 10, "width": 20} for i, name in enumerate(names)]
    folder = made_coco(tmp_path / "coco", [], images)
    turned = Image.Exif()
    turned[0x0112] = 6
    for name in names[1:4]:
        Image.new("RGB", (10, 20)).save(folder / "train2017" / name, exif=turned)
    Image.new("RGB", (10, 20)).save(folder / "train2017" / "flat.jpg")
    read = open_annotated(folder, "train")
    assert tuple(read.names) == names[:4]
    assert read.bad == [("flat.jpg", "it has 20 x 10 pixels, its annotations are for 10 x 20")]
    assert all(read.pixels(i).shape == (3, 10, 20) for i in range(4))


def test_damaged_images_are_found_before_they_are_needed(tmp_path):
    images = [{"id": i, "file_name": name, "height": 10, "width": 20} for i, name in enumerate(("a.png", "b.png"))]
    folder = made_coco(tmp_path / "coco", [], images) / "train2017"
    content = (folder / "a.png").read_bytes()
    (folder / "b.png").write_bytes(content[:-24])
    read, seen = open_annotated(folder.parent, "train"), []
    whole = read.without_unreadable(seen.append)
    assert len(read) == 2 and list(whole.names) == ["a.png"] and sum(seen) == 2
    assert [name for name, _ in whole.bad] == ["b.png"] and "left out 1 bad" in whole.skipped()
    assert whole.without_unreadable(seen.append) is whole


def test_objects_without_a_mask_are_ignored_if_masks_are_wanted(tmp_path):
    place = {"image_id": 7, "category_id": 1}
    rows = [
        {**place, "id": 1, "bbox": [1, 1, 4, 4], "segmentation": [[1, 1, 5, 1, 5, 5, 1, 5]]},
        {**place, "id": 2, "bbox": [8, 2, 4, 6]},
    ]
    folder = made_coco(tmp_path / "coco", rows)
    boxes, masks = (open_annotated(folder, "train", task) for task in ("boxes", "masks"))
    assert not boxes.objects(0, False).ignored.any() and not boxes.skipped()
    found = masks.objects(0, True)
    assert found.ignored.tolist() == found.crowds.tolist() == [False, True]
    assert found.masks.flatten(1).sum(1).tolist() == [16, 24]  # a detection inside of its box does not count
    assert "1 objects without a mask are ignored" in masks.skipped()


def test_keypoints_without_names_do_not_take_their_boxes_with_them(tmp_path):
    rows = [{"id": 1, "image_id": 7, "category_id": 1, "bbox": [1, 1, 4, 4], "keypoints": [1, 1, 2]}]
    read = open_annotated(made_coco(tmp_path / "coco", rows), "train")
    assert not read.bad and len(read.objects(0, False)) == 1 and read.keypoints is None


def write_xml(folder, name, objects, head="<size><width>20</width><height>10</height></size>"):
    (folder / "Annotations").mkdir(parents=True, exist_ok=True)
    (folder / "JPEGImages").mkdir(exist_ok=True)
    Image.new("RGB", (20, 10)).save(folder / "JPEGImages" / f"{name}.jpg")
    (folder / "Annotations" / f"{name}.xml").write_text(f"<annotation>{head}{objects}</annotation>")


def xml_object(x1, y1, x2, y2, name="dog", rest=""):
    box = f"<bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox>"
    return f"<object><name>{name}</name>{rest}{box}</object>"


def test_voc_counts_pixels_from_one_and_lists_bad_objects(tmp_path):
    good = xml_object(1, 1, 4, 2) + xml_object(5, 2, 20, 10, "cat", "<difficult>1</difficult>")
    bad = xml_object(5, 5, 4, 6) + xml_object("a", 1, 2, 2) + xml_object(30, 1, 40, 3) + xml_object(1, 1, 2, 2, " ")
    write_xml(tmp_path / "VOC2007", "000001", good + bad)
    write_xml(tmp_path / "VOC2007", "000002", "", head="")
    write_xml(tmp_path / "VOC2007", "000003", "&a;", head="<!DOCTYPE a [<!ENTITY a 'b'>]>")
    (tmp_path / "VOC2007" / "ImageSets" / "Main").mkdir(parents=True)
    lists = tmp_path / "VOC2007" / "ImageSets" / "Main"
    (lists / "trainval.txt").write_text("000001\n000002\n000003\n000004\n")
    read = open_annotated(tmp_path, "train")
    found = read.objects(0, False)
    assert list(read.names) == ["VOC2007/JPEGImages/000001.jpg"] and read.classes == ("cat", "dog")
    assert found.boxes.tolist() == [[0, 0, 4, 2], [4, 1, 20, 10]] and found.ignored.tolist() == [False, True]
    reasons = [reason for _, reason in read.bad]
    for part in (
        "without area",
        "not four numbers",
        "outside",
        "without a name",
        "width and height",
        "type",
        "no such",
    ):
        assert any(part in reason for reason in reasons), part
    with pytest.raises(DataError, match="no usable image of split 'test'"):
        open_annotated(tmp_path, "test")


def test_voc_years_are_joined_and_the_test_split_is_that_of_the_year_that_has_one(tmp_path):
    for year, names in (("VOC2007", ("a", "b")), ("VOC2012", ("c",))):
        folder = tmp_path / year
        for name in names:
            write_xml(folder, name, xml_object(1, 1, 4, 2))
        (folder / "ImageSets" / "Main").mkdir(parents=True)
        (folder / "ImageSets" / "Main" / "trainval.txt").write_text(f"{names[0]}\n")
    (tmp_path / "VOC2007" / "ImageSets" / "Main" / "test.txt").write_text("b\n")
    assert [name[-5:] for name in open_annotated(tmp_path, "train").names] == ["a.jpg", "c.jpg"]
    assert [name[-5:] for name in open_annotated(tmp_path, "test").names] == ["b.jpg"]


def write_lists(folder, **lists):
    place = folder / "ImageSets" / "Main"
    place.mkdir(parents=True)
    for name, stems in lists.items():
        (place / f"{name}.txt").write_text("\n".join(stems))
        for stem in stems:
            write_xml(folder, stem, xml_object(1, 1, 4, 2))


def stems_of(folder):
    return [[name[-5:-4] for name in open_annotated(folder, split).names] for split in ("train", "test")]


def test_voc_splits_have_no_image_in_common(tmp_path):
    write_lists(tmp_path / "VOC2012", train=["c"], val=["d"], trainval=["c", "d"])  # as it is distributed
    assert stems_of(tmp_path) == [["c"], ["d"]]
    write_lists(tmp_path / "VOC2007", trainval=["a"], test=["b"])
    assert stems_of(tmp_path) == [["a", "c", "d"], ["b"]]
    (tmp_path / "VOC2007" / "ImageSets" / "Main" / "test.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"trainval.txt and test.txt have 1 images in common, the first a"):
        open_annotated(tmp_path, "train")


def test_a_source_that_is_none_says_what_is_allowed(tmp_path):
    with pytest.raises(DataError, match=r"no annotations for split 'train'.*COCO.*VOC.*canvases"):
        open_annotated(tmp_path)
    with pytest.raises(DataError, match="no folder"):
        open_annotated(tmp_path / "missing")


@quick
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_run_lengths_and_their_text_read_back(height, width, seed):
    mask = np.random.default_rng(seed).random((height, width)) < 0.5
    counts = run_lengths(mask)
    assert (mask_of_runs(counts, height, width) == mask).all()
    assert runs_of_text(text_of_runs(counts)) == counts


@quick
@given(st.lists(st.floats(-5, 45), min_size=6, max_size=16), st.integers(1, 40), st.integers(1, 40))
def test_masks_of_polygons_and_run_lengths_are_those_of_pycocotools(corners, height, width):
    reference = pytest.importorskip("pycocotools.mask", reason="pycocotools is not installed")
    corners = corners[: len(corners) // 2 * 2]
    (code,) = reference.frPyObjects([corners], height, width)
    assert (mask_of_polygon(corners, height, width) == reference.decode(code).astype(bool)).all()
    text = code["counts"].decode()
    assert text_of_runs(runs_of_text(text)) == text
    expected = reference.decode(code).astype(bool)
    assert (decode_mask({"size": [height, width], "counts": text}, height, width) == expected).all()
