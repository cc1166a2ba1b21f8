"""The gallery: tiles show what their entries say, neighbors are the cosine's, names come back byte for byte."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kontrast.errors import EnvironmentFault
from kontrast.lens.gallery import choose_queries, replace, thumbnail, write_gallery
from kontrast.lens.measures import directions


def flat_pictures(count: int, channels: int = 3, height: int = 32, width: int = 32) -> torch.Tensor:
    """Picture i is one colour, different for each i below 256."""
    colour = torch.arange(count, dtype=torch.uint8)[:, None, None, None]
    return colour.expand(count, channels, height, width).clone()


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


def test_neighbours_are_the_cosines_and_tiles_are_their_pictures(tmp_path, features):
    labels = torch.arange(90) % 3
    names = [str(i) for i in range(90)]
    write_gallery(
        tmp_path, features, flat_pictures(90), labels, ["a", "b", "c"], names, points=40, queries=6, neighbors=4
    )
    gallery, sprite = read(tmp_path)
    assert len(gallery["points"]) == 40
    assert len(gallery["queries"]) == 6
    unit = torch.nn.functional.normalize(features, dim=1)
    cosines = (unit @ unit.T).fill_diagonal_(-2)
    for query in gallery["queries"]:
        best = cosines[int(query["name"])].topk(4)
        assert [int(n["name"]) for n in query["neighbors"]] == best.indices.tolist()
        assert [n["similarity"] for n in query["neighbors"]] == pytest.approx(best.values.tolist(), abs=1e-4)
    entries = [*gallery["points"], *gallery["queries"], *(n for q in gallery["queries"] for n in q["neighbors"])]
    for entry in entries:
        assert (shown(gallery, sprite, entry["tile"]) == int(entry["name"])).all()
        assert entry["label"] == int(entry["name"]) % 3
    assert gallery["count"] == len({entry["tile"] for entry in entries})


def test_queries_go_through_the_classes_and_the_seed_decides(features):
    labels = torch.tensor([0] * 80 + [1] * 5 + [2] * 5)
    draw = lambda seed: choose_queries(labels, torch.arange(90), 6, torch.Generator().manual_seed(seed))  # noqa: E731
    assert sorted(labels[draw(0)].tolist()) == [0, 0, 1, 1, 2, 2]
    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    many = torch.arange(90)
    assert len(set(choose_queries(many, torch.arange(90), 12, torch.Generator().manual_seed(0)))) == 12


def test_neighbours_among_train_images(tmp_path, features):
    train = torch.cat([features + 1e-3, -features[:50]])
    write_gallery(
        tmp_path,
        features,
        flat_pictures(90),
        None,
        None,
        [str(i) for i in range(90)],
        train_features=train,
        train_images=flat_pictures(140),
        train_labels=None,
        train_names=[f"train/{i}" for i in range(140)],
        queries=5,
        neighbors=3,
    )
    gallery, sprite = read(tmp_path)
    assert gallery["neighbours_from"] == "train"
    for query in gallery["queries"]:
        first = query["neighbors"][0]
        assert first["name"] == f"train/{query['name']}"  # its own near copy is not left out: it is another image
        assert (shown(gallery, sprite, first["tile"]) == int(query["name"])).all()


def test_classes_that_have_images_are_counted(tmp_path, features):
    labels = torch.tensor([3] * 60 + [7] * 29 + [-1])
    write_gallery(tmp_path, features, flat_pictures(90), labels, [str(n) for n in range(8)], ["x"] * 90)
    assert read(tmp_path)[0]["classes_present"] == 2


def test_hostile_names_come_back_exactly(tmp_path, features):
    names = [f"</script>\n\udcff\u2028=cmd|{i}" for i in range(90)]
    write_gallery(tmp_path, features, flat_pictures(90), None, None, names)
    gallery, _ = read(tmp_path)
    assert {point["name"] for point in gallery["points"]} == set(names)
    assert gallery["classes"] is None
    assert all(point["label"] is None for point in gallery["points"])


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_few_images(tmp_path, count):
    write_gallery(tmp_path, torch.randn(count, 4), flat_pictures(count), None, None, ["x"] * count)
    gallery, _ = read(tmp_path)
    assert len(gallery["points"]) == count
    assert all(len(query["neighbors"]) == min(8, count - 1) for query in gallery["queries"])


def test_features_that_are_not_finite_stay_out_of_the_json(tmp_path, features):
    features[0], features[1] = torch.nan, 0.0
    write_gallery(tmp_path, features, flat_pictures(90), None, None, ["x"] * 90)
    assert "NaN" not in (tmp_path / "gallery.json").read_text()


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 96, 48), (4, 32, 32), (3, 1, 500)])
def test_pictures_of_any_size_keep_their_ratio(channels, height, width):
    tile = thumbnail(torch.full((channels, height, width), 200, dtype=torch.uint8))
    assert tile.shape == (3, 32, 32)
    long, short = max(height, width), min(height, width)
    assert int((tile == 200).all(0).sum()) == 32 * max(1, round(32 * short / long))


def test_directions_of_very_large_and_very_small_rows(features):
    for scale in (1e38, 1e-38, 1e-44):
        unit = directions(torch.ones(4, 6) * scale)
        torch.testing.assert_close(unit, torch.full((4, 6), 6**-0.5))
    assert not directions(torch.zeros(2, 6)).any()


def test_what_a_kill_leaves_is_swept_on_resuming(tmp_path, monkeypatch):
    """The name of the half-written file is one that the run's holder removes (files.sweep)."""
    from kontrast.files import sweep

    with monkeypatch.context() as killed:
        killed.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            replace(tmp_path / "gallery.png", b"half")
    assert len(list(tmp_path.iterdir())) == 1
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, r"no space left to write .*gallery.json \(5 bytes needed\): free some"),
        (errno.EDQUOT, "no space left to write"),
        (errno.EROFS, "can't write .*gallery.json: Read-only file system"),
        (errno.EIO, "can't write .*gallery.json: Input/output error"),
    ],
)
@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_the_disks_refusals_are_faults_of_the_environment(tmp_path, monkeypatch, number, words, place):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    (tmp_path / "gallery.json").write_bytes(b"old")
    monkeypatch.setattr(os, place, refuse)
    with pytest.raises(EnvironmentFault, match=words) as caught:
        replace(tmp_path / "gallery.json", b"12345")
    assert caught.value.exit_code == 6
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_folder_that_is_not_there_is_one_too(tmp_path):
    with pytest.raises(EnvironmentFault, match=r"can't write .*No such file or directory"):
        replace(tmp_path / "none" / "gallery.json", b"12345")


def test_columns_of_different_length_are_refused_and_nothing_is_written(tmp_path, features):
    with pytest.raises(ValueError, match=r"one entry an image.*'names': 3"):
        write_gallery(tmp_path, features, flat_pictures(90), None, None, ["a", "b", "c"])
    assert not list(tmp_path.iterdir())
