"""The gallery: tiles show what their entries describe, neighbors are nearest by cosine, names survive exactly."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kontrast.data import ImageSet
from kontrast.errors import EnvironmentFault
from kontrast.lens.gallery import GallerySplit, choose_queries, thumbnail, write_gallery
from kontrast.lens.measures import directions


def split(features, labels=None, names=None, source: str = "test", classes=None) -> GallerySplit:
    """A split whose image i has one color, different for each i below 256, and the name i."""
    colors = torch.arange(len(features), dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 32, 32)
    images = ImageSet(colors, names or [str(i) for i in range(len(features))], labels, classes=classes)
    return GallerySplit(source, features, images)


def read(folder: Path) -> tuple[dict, np.ndarray]:
    gallery = json.loads((folder / "gallery.json").read_text("ascii"))
    return gallery, np.asarray(Image.open(folder / "gallery.png"))


def shown(gallery: dict, sprite: np.ndarray, tile: int) -> np.ndarray:
    size, columns = gallery["tile"], gallery["columns"]
    top, left = tile // columns * size, tile % columns * size
    return sprite[top : top + size, left : left + size]


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(90, 6, generator=torch.Generator().manual_seed(0))


def test_neighbors_are_nearest_by_cosine_and_tiles_show_them(tmp_path, features):
    labels = torch.arange(90) % 3
    write_gallery(tmp_path, split(features, labels, classes=["a", "b", "c"]), points=40)
    gallery, sprite = read(tmp_path)
    assert len(gallery["points"]) == 40
    assert len(gallery["queries"]) == 12
    unit = torch.nn.functional.normalize(features, dim=1)
    cosines = (unit @ unit.T).fill_diagonal_(-2)
    for query in gallery["queries"]:
        best = cosines[int(query["name"])].topk(8)
        assert [int(n["name"]) for n in query["neighbours"]] == best.indices.tolist()
        assert [n["similarity"] for n in query["neighbours"]] == pytest.approx(best.values.tolist(), abs=1e-4)
    entries = [*gallery["points"], *gallery["queries"], *(n for q in gallery["queries"] for n in q["neighbours"])]
    for entry in entries:
        assert (shown(gallery, sprite, entry["tile"]) == int(entry["name"])).all()
        assert entry["label"] == int(entry["name"]) % 3
    assert gallery["count"] == len({entry["tile"] for entry in entries})


def test_queries_take_turns_between_classes_and_depend_on_the_seed(features):
    labels = torch.tensor([0] * 80 + [1] * 5 + [2] * 5)
    draw = lambda seed: choose_queries(labels, torch.arange(90), 6, torch.Generator().manual_seed(seed))  # noqa: E731
    assert sorted(labels[draw(0)].tolist()) == [0, 0, 1, 1, 2, 2]
    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    many = torch.arange(90)
    assert len(set(choose_queries(many, torch.arange(90), 12, torch.Generator().manual_seed(0)))) == 12


def test_neighbors_among_train_images(tmp_path, features):
    train = torch.cat([features + 1e-3, -features[:50]])
    names = [f"train/{i}" for i in range(140)]
    write_gallery(tmp_path, split(features), split(train, None, names, "train"))
    gallery, sprite = read(tmp_path)
    assert gallery["neighbours_from"] == "train"
    for query in gallery["queries"]:
        first = query["neighbours"][0]
        assert first["name"] == f"train/{query['name']}"  # its near copy counts: it is another image
        assert (shown(gallery, sprite, first["tile"]) == int(query["name"])).all()


def test_classes_that_have_images_are_counted(tmp_path, features):
    labels = torch.tensor([3] * 60 + [7] * 29 + [-1])
    write_gallery(tmp_path, split(features, labels, classes=[str(n) for n in range(8)]))
    assert read(tmp_path)[0]["classes_present"] == 2


def test_hostile_names_survive_exactly(tmp_path, features):
    names = [f"</script>\n\udcff\u2028=cmd|{i}" for i in range(90)]
    write_gallery(tmp_path, split(features, names=names))
    gallery, _ = read(tmp_path)
    assert {point["name"] for point in gallery["points"]} == set(names)
    assert gallery["classes"] is None
    assert all(point["label"] is None for point in gallery["points"])


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_few_images(tmp_path, count):
    write_gallery(tmp_path, split(torch.randn(count, 4)))
    gallery, _ = read(tmp_path)
    assert len(gallery["points"]) == count
    assert all(len(query["neighbours"]) == min(8, count - 1) for query in gallery["queries"])


def test_features_that_are_not_finite_stay_out_of_the_json(tmp_path, features):
    features[0], features[1] = torch.nan, 0.0
    write_gallery(tmp_path, split(features))
    assert "NaN" not in (tmp_path / "gallery.json").read_text()


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 96, 48), (4, 32, 32), (3, 1, 500)])
def test_pictures_of_any_size_keep_their_aspect_ratio(channels, height, width):
    tile = thumbnail(torch.full((channels, height, width), 200, dtype=torch.uint8))
    assert tile.shape == (3, 32, 32)
    long, short = max(height, width), min(height, width)
    assert int((tile == 200).all(0).sum()) == 32 * max(1, round(32 * short / long))


def test_directions_of_very_large_and_very_small_rows(features):
    for scale in (1e38, 1e-38, 1e-44):
        unit = directions(torch.ones(4, 6) * scale)
        torch.testing.assert_close(unit, torch.full((4, 6), 6**-0.5))
    assert not directions(torch.zeros(2, 6)).any()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_error_keeps_the_old_files(tmp_path, features, monkeypatch, number, call):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    (tmp_path / "gallery.png").write_bytes(b"old")
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(EnvironmentFault, match=r"gallery\.png") as caught:
        write_gallery(tmp_path, split(features))
    assert caught.value.exit_code == 6
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
