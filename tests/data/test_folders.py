"""Folders as data: classes, splits, names, links, and the folder that holds every kind of bad file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from test_decode import encoded, header_only_png

from kontrast.data import open_data, read_labels
from kontrast.data.packing import check_bad
from kontrast.registry import DataError, UsageError


def test_classes_and_held_out_part(make_folder):
    root = make_folder(classes=3, each=20)
    train, test = open_data(root, "train"), open_data(root, "test")
    assert train.classes == test.classes == ["class0", "class1", "class2"]
    assert torch.bincount(train.labels).tolist() == [16] * 3 and torch.bincount(test.labels).tolist() == [4] * 3
    assert not set(train.names) & set(test.names) and train.has_test
    assert len(open_data(root, "all")) == 60
    for name, label in zip(test.names, test.labels):
        assert name.startswith(f"class{label}/")


def test_the_pixels_are_those_of_the_named_file(make_folder):
    root = make_folder(classes=2, each=6)
    images = open_data(root, "all")
    for name, pixels in zip(images.names, images.images):
        np.testing.assert_array_equal(pixels.permute(1, 2, 0), np.asarray(Image.open(root / name)))


def test_a_new_file_moves_no_other_between_the_parts_but_at_the_edge(make_folder):
    root = make_folder(classes=2, each=50)
    before = set(open_data(root, "test").names)
    Image.new("RGB", (16, 16)).save(root / "class0" / "new.png")
    assert len(before - set(open_data(root, "test").names)) <= 1


def test_train_and_test_folders_are_the_parts(make_folder, tmp_path):
    make_folder(classes=2, each=5, name="set/train")
    make_folder(classes=2, each=3, name="set/val")
    assert len(open_data(tmp_path / "set", "train")) == 10
    assert len(open_data(tmp_path / "set", "test")) == 6
    with pytest.raises(UsageError, match="did you mean 'train'"):
        open_data(tmp_path / "set", "trian")


def test_flat_folder_has_no_labels_and_no_test_part(make_folder):
    root = make_folder(classes=1, each=7)
    images = open_data(root)
    assert images.labels is None and images.classes is None and len(images) == 7 and not images.has_test
    with pytest.raises(DataError, match="no test part"):
        open_data(root, "test")


def test_nested_and_any_case(tmp_path):
    for number, name in enumerate(["a/b/c/x.JPG", "a/y.JpEg", "b/z.PNG", "b/d/w.Tiff", "b/v.bmp", "b/u.WEBP"]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        form = {"jpg": "JPEG", "jpeg": "JPEG"}.get(path.suffix[1:].lower(), path.suffix[1:].upper())
        Image.new("RGB", (8, 8), (number, 0, 0)).save(path, form)
    images = open_data(tmp_path, "all")
    assert len(images) == 6 and images.classes == ["a", "b"] and images.labels.tolist() == [0, 0, 1, 1, 1, 1]


def test_missing_empty_and_without_images(tmp_path):
    (tmp_path / "pictures").mkdir()
    with pytest.raises(DataError, match="no images"):
        open_data(tmp_path / "pictures")
    with pytest.raises(DataError, match=r"did you mean .*pictures"):
        open_data(tmp_path / "picturs")
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        open_data("cifar-10")
    (tmp_path / "pictures" / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match="only 1 other files"):
        open_data(tmp_path / "pictures")


def bad_folder(root):
    """100 good pictures and one of every kind of trouble."""
    root.mkdir()
    for i in range(100):
        Image.new("RGB", (16, 16), (i, 2 * i, 255 - i)).save(root / f"good{i:03d}.png")
    jpeg = encoded(Image.effect_noise((64, 64), 80).convert("RGB"), "JPEG")
    png = bytearray(encoded(Image.effect_noise((64, 64), 80), "PNG"))
    png[len(png) // 2] ^= 0xFF
    (root / "truncated.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (root / "corrupt.png").write_bytes(bytes(png))
    (root / "text.jpg").write_text("<html>not found</html>")
    (root / "empty.jpg").write_bytes(b"")
    (root / "bomb.png").write_bytes(header_only_png(20_000, 20_000))
    Image.new("CMYK", (16, 16), (255, 0, 0, 0)).save(root / "cmyk.jpg")
    Image.new("P", (16, 16), 3).save(root / "palette.png")
    Image.fromarray(np.full((16, 16), 30_000, dtype=np.uint16)).save(root / "deep.png")
    Image.new("RGB", (1, 1), (1, 2, 3)).save(root / "dot.png")
    Image.fromarray(np.ones((16, 16), dtype=np.float32)).save(root / "float.tiff")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(root / "turned.jpg", exif=exif)
    (root / "dangling.jpg").symlink_to(root / "nowhere.jpg")
    Image.new("RGB", (16, 16)).save(root / "locked.png")
    (root / "locked.png").chmod(0)


def test_every_bad_file_is_skipped_and_named(tmp_path):
    root = tmp_path / "pictures"
    bad_folder(root)
    images = open_data(root)
    reasons = dict(images.bad)
    expected = {"truncated.jpg", "corrupt.png", "text.jpg", "empty.jpg", "bomb.png", "float.tiff", "dangling.jpg"}
    if os.geteuid() != 0:
        expected.add("locked.png")
        assert "Permission denied (13)" in reasons["locked.png"]
    assert set(reasons) == expected
    assert "HTML" in reasons["text.jpg"] and "empty" in reasons["empty.jpg"] and "pixels" in reasons["bomb.png"]
    assert "dangling" in reasons["dangling.jpg"] and images.notes["turned"] == 1
    kept = dict(zip(images.names, range(len(images))))
    assert {"cmyk.jpg", "palette.png", "deep.png", "dot.png", "turned.jpg"} <= set(kept)
    assert images.images[kept["turned.jpg"]].shape == (3, 20, 10)
    assert abs(int(images.images[kept["deep.png"]][0, 0, 0]) - 30_000 // 257) <= 1
    batch, sizes = images.batch(torch.tensor([kept["dot.png"], kept["good007.png"]]))
    assert batch.shape == (2, 3, 16, 16) and sizes.tolist() == [[1, 1], [16, 16]]
    assert batch[0, :, 0, 0].tolist() == [1, 2, 3]
    assert images[0:5].shape[:2] == (5, 3)


def test_too_many_bad_files_stop_with_the_list(make_folder):
    root = make_folder(classes=1, each=20)
    for i in range(5):
        (root / f"broken{i}.jpg").write_bytes(b"nothing")
    told = (
        r"5 of 25 images .* 5% allowed \(1 images, .*'not an image: text'\): broken0.jpg \(not an image.*data.max_bad="
    )
    with pytest.raises(DataError, match=told):
        open_data(root)
    assert len(open_data(root, max_bad=0.5).bad) == 5
    (root / "broken0.jpg").rename(root / "only.jpg")
    with pytest.raises(DataError, match="bad"):
        open_data(root, max_bad=0.0)


def test_a_mixed_handful_passes_where_many_alike_do_not(make_folder):
    """12 of 112 bad: allowed to be of twelve kinds, not to be six of one kind."""
    mixed = [(f"{i}.jpg", f"reason {'abcdefghijkl'[i]}") for i in range(12)]
    check_bad(mixed, 112, 0.05, "pictures")
    alike = [(name, f"damaged: {i} bytes left" if i < 6 else reason) for i, (name, reason) in enumerate(mixed)]
    with pytest.raises(
        DataError, match=r"12 of 112 .* \(5 images, or 16 of mixed kinds; 6 are 'damaged: N bytes left'\)"
    ):
        check_bad(alike, 112, 0.05, "pictures")
    check_bad(alike[1:], 112, 0.05, "pictures")
    with pytest.raises(DataError, match="17 of 112"):
        check_bad(mixed + [(f"x{i}", f"other {'abcde'[i]}") for i in range(5)], 112, 0.05, "pictures")


def test_the_folder_of_bad_files_pretrains_and_says_what_it_skipped(tmp_path):
    """Through the command itself: its exit code, and the first names with their reasons."""
    root = tmp_path / "pictures"
    bad_folder(root)
    start = "from kontrast.cli import main; main()"
    command = [sys.executable, "-c", start, "pretrain", str(root), "--out", str(tmp_path / "run"), "--no-probes"]
    tiny = ["training.max_steps=3", "training.batch=16", "encoder.width=16", "views.size=16", "head.outputs=16"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, "--device", "cpu", *tiny], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    said = re.search(r"skipped (\d+) of 113 images: dangling.jpg \(dangling link\), bomb.png \(more than", done.stderr)
    assert said and 6 < int(said[1]) <= 8, done.stderr
    assert (tmp_path / "run" / "encoder.safetensors").is_file()


def test_names_of_any_bytes_round_trip(tmp_path):
    names = [b"new\nline.png", b'quote".png', b"<script>.png", b"\xff\xfe.png", "größe.png".encode()]
    for name in names:
        Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
        os.rename(tmp_path / "x.png", os.path.join(os.fsencode(tmp_path), name))
    images = open_data(tmp_path)
    again = json.loads(json.dumps(list(images.names)))
    assert sorted(map(os.fsencode, again)) == sorted(names)


def test_links_are_followed_once_when_asked(make_folder, tmp_path):
    root = make_folder(classes=2, each=4)
    (root / "class0" / "loop").symlink_to(root)
    (root / "class1" / "twice.png").symlink_to(root / "class1" / "0000.png")
    os.link(root / "class0" / "0000.png", root / "class0" / "hard.png")
    plain = open_data(root, "all")
    assert len(plain) == 9 and plain.notes["links not followed"] == 2
    followed = open_data(root, "all", follow_links=True)
    assert len(followed) == 8 and followed.notes["seen twice"] >= 2


def test_fingerprint_follows_files(make_folder):
    root = make_folder(classes=1, each=5)
    first = open_data(root).fingerprint
    assert open_data(root).fingerprint == first
    os.utime(root / "0000.png", ns=(1, 1))
    touched = open_data(root).fingerprint
    (root / "0001.png").unlink()
    assert len({first, touched, open_data(root).fingerprint}) == 3


def test_labels_from_a_csv(make_folder, tmp_path):
    images = open_data(make_folder(classes=1, each=4))
    table = tmp_path / "labels.csv"
    table.write_text("name,label\n" + "".join(f"{n},{'cat' if i % 2 else 'dog'}\n" for i, n in enumerate(images.names)))
    labelled = read_labels(images, table)
    assert labelled.classes == ["cat", "dog"] and labelled.labels.tolist() == [1, 0, 1, 0]
    table.write_text("0000.png,cat\n0001.png,dog\n")
    with pytest.raises(DataError, match=r"no label for 2 of 4 images, the first '0002.png'"):
        read_labels(images, table)
    table.write_text("0000.png,cat\n0000.png,dog\n")
    with pytest.raises(DataError, match="two labels"):
        read_labels(images, table)
