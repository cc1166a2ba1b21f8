"""The memory of a batch depends on the views, not on the largest picture, and slow decoding is announced."""

from __future__ import annotations

import io
import math
import time

import numpy as np
import pytest
import torch
from PIL import Image

from kontrast.config.recipe import read_recipe
from kontrast.data import Feeder, open_data
from kontrast.data import decode_workers as workers
from kontrast.data.decode import Limits, decode, read_sides
from kontrast.data.packing_estimate import sample_decoding
from kontrast.errors import EnvironmentFault
from kontrast.training.auto_recipe import LONGEST, bounded
from kontrast.training.build import build_views

from support.made_images import picture


def jpeg(width: int, height: int) -> bytes:
    content = io.BytesIO()
    picture(width, 6).resize((width, height), Image.Resampling.BICUBIC).save(content, "JPEG", quality=95)
    return content.getvalue()


@pytest.mark.parametrize("sides", [(100, 100), (600, 400), (400, 600), (640, 100), (90, 1200), (700, 690), (31, 33)])
@pytest.mark.parametrize("bound, longest", [(64, 96), (64, None), (None, None)])
def test_images_fit_into_the_bounds_and_keep_their_content(tmp_path, sides, bound, longest):
    limits = Limits(bound, longest=longest)
    content = jpeg(*sides)
    pixels, _ = decode(content, limits)
    height, width = pixels.shape[1:]
    assert longest is None or max(height, width) <= longest
    assert bound is None or min(height, width) <= bound
    if bound and min(sides) > bound and max(sides) * bound <= (longest or math.inf) * min(sides):
        assert min(height, width) == bound
    if bound is None or (min(sides) <= bound and max(sides) <= (longest or math.inf)):
        assert (width, height) == sides
    assert abs(width / height / (sides[0] / sides[1]) - 1) < 1.2 / min(width, height)
    (tmp_path / "a.jpg").write_bytes(content)
    expected = read_sides(str(tmp_path / "a.jpg"), limits=limits)  # a draft is rounded to whole pixels first
    assert np.abs(np.subtract(expected, sorted([height, width]))).max() <= (1 if bound else 0)
    whole = Image.open(io.BytesIO(content)).convert("RGB").resize((width, height), Image.Resampling.BOX)
    assert np.abs(pixels.transpose(1, 2, 0).astype(float) - np.asarray(whole)).mean() < 16


def test_records_without_a_longest_side_are_those_of_older_stores():
    assert list(Limits(64, float_range=[0, 1]).facts().items()) == [
        ("bound", 64), ("max_pixels", 64_000_000), ("float_range", (0, 1)),
    ]  # fmt: skip
    assert Limits(64, longest=96).facts()["longest"] == 96


@pytest.mark.parametrize(
    "views, least",
    [
        ({"policy": "moco-v2", "size": 224}, 501),
        ({"policy": "simclr-cifar", "size": 32, "crop_scale": [0.25, 1.0]}, 64),
        ({"policy": "moco-v2", "size": 224, "crop_scale": [0.9, 1.0], "local_count": 2, "local_size": 96}, 430),
    ],
)
def test_the_smallest_crop_has_the_pixels_of_its_view(views, least):
    recipe = read_recipe({"views": views})
    data = bounded(recipe).data
    assert data.size == least and data.longest == math.ceil(LONGEST * least)
    made = build_views(recipe, torch.float32)
    for policy, size in [(p, made.size) for p in made.policies] + [(p, made.local_size) for p in made.local_policies]:
        assert data.size * math.sqrt(policy.crop_scale[0]) >= size


def test_one_huge_picture_does_not_enlarge_the_batch(tmp_path):
    root = tmp_path / "pictures"
    root.mkdir()
    for number, sides in enumerate([(40, 30)] * 7 + [(1600, 1200), (20, 900)]):
        (root / f"{number}.jpg").write_bytes(jpeg(*sides))
    for pack in (True, False):
        images = open_data(root, size=48, longest=72, pack=pack)
        batch = next(Feeder(images, 9).batches(0))
        assert batch.images.shape[0] == 9 and max(batch.images.shape[2:]) <= 72


def test_a_new_run_reduces_and_a_resumed_one_keeps_its_size(make_folder, tmp_path):
    from kontrast.training.pretrain import pretrain
    from kontrast.training.run_folder import RunFolder, stored_recipe

    root = make_folder(classes=1, each=24)
    picture(1, 90).resize((400, 300)).save(root / "large.png")
    tiny = {"training.batch": 8, "encoder.width": 16, "views.size": 16, "head.outputs": 16, "evaluation.every": 0}
    out = tmp_path / "run"
    run = {"recipe": "cifar10/simclr", "out": out, "device": "cpu", "say": lambda line: None}
    small = {**tiny, "encoder.name": "small-conv", "training.max_steps": 2, "training.precision": "float32"}
    small.pop("encoder.width")
    pretrain(str(root), overrides=small, **run)
    data = stored_recipe(RunFolder(out)).data
    assert 16 < data.size < 90 and data.longest == math.ceil(LONGEST * data.size)
    pretrain(str(root), overrides={**small, "training.max_steps": 4}, resume=True, **run)
    assert stored_recipe(RunFolder(out)).data == data
    pretrain(str(root), overrides={**small, "data.size": 0}, **{**run, "out": tmp_path / "whole"})
    assert stored_recipe(RunFolder(tmp_path / "whole")).data.size == 0
    pretrain("digits", overrides=small, **{**run, "out": tmp_path / "digits"})
    assert stored_recipe(RunFolder(tmp_path / "digits")).data.size == 0, "nothing is reduced"


def test_what_packing_takes_is_said_beforehand(make_folder, monkeypatch):
    monkeypatch.setattr("kontrast.data.sources.ANNOUNCED", 10)
    monkeypatch.setattr("kontrast.data.sources.IN_MEMORY", 10)
    root, lines = make_folder(classes=1, each=20), []
    found = open_data(root, pack=False)
    open_data(root, say=lines.append)
    assert len(lines) == 1 and lines[0].startswith("packing 20 images once: about ") and "data.pack=false" in lines[0]
    open_data(root, say=lines.append)
    assert len(lines) == 1, "the store is there"
    picture(5, 16).save(root / "one-more.png")
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1000}))
    with pytest.raises(EnvironmentFault, match=r"packing 21 images takes about 0.0 GB, but 0.0 GB are free"):
        open_data(root)
    assert len(found) == 20


def test_the_sample_is_representative(make_folder):
    from kontrast.data.listing import scan_folder

    rate, each = sample_decoding(scan_folder(str(make_folder(classes=1, each=50))), Limits())
    assert rate > 1 and each == 3 * 16 * 16


def test_slow_decoding_is_named_once(make_folder, monkeypatch):
    monkeypatch.setattr("kontrast.data.sources._free_memory", lambda: 0)
    decode_file = workers.decode_file
    monkeypatch.setattr(workers, "decode_file", lambda *given: time.sleep(0.005) or decode_file(*given))
    images = open_data(make_folder(classes=1, each=48), pack=False, workers=1, size=12)
    feeder = Feeder(images, 4)
    assert feeder.bottleneck() == "", "the first window has the compilation of the network"
    for _ in feeder.batches(0):
        pass
    line = feeder.bottleneck()
    assert line.startswith("decoding is the bottleneck: training waits ") and "kontrast pack" in line
    assert "--size 12" in line
    for _ in feeder.batches(1):
        pass
    assert feeder.bottleneck() == ""


def test_fast_decoding_is_not_named(make_folder, monkeypatch):
    monkeypatch.setattr("kontrast.data.sources._free_memory", lambda: 0)
    feeder = Feeder(open_data(make_folder(classes=1, each=48), pack=False, workers=1), 4)
    feeder.bottleneck()
    for _ in feeder.batches(0):
        time.sleep(0.03)
    assert feeder.bottleneck() == ""
