"""One folder that contains every kind of bad file."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
import torch
from PIL import Image

from kontrast.data import open_data

from support.command_line import kontrast
from support.made_images import QUICK, encoded, png_bomb


def bad_folder(root):
    """Write 100 good images and one of every kind of bad file."""
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
    (root / "bomb.png").write_bytes(png_bomb(20_000, 20_000))
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


@pytest.mark.fault(11, 12, 13, 14, 15)
def test_every_kind_of_bad_file(tmp_path):
    """Next to 100 good images, what can be read is read and the rest is named."""
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


@pytest.mark.fault(11, 12, 13)
def test_folder_of_bad_files_trains(tmp_path):
    """Exit 0 with the first names and reasons; all of them are in bad.jsonl."""
    root = tmp_path / "pictures"
    bad_folder(root)
    done = kontrast("pretrain", str(root), *QUICK, "--no-probes", "--device", "cpu", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    said = re.search(r"(\d+) of 113 images: dangling.jpg \(.*?\), bomb.png \(", done.stderr)
    assert said and 6 < int(said[1]) <= 8, done.stderr
    assert len((tmp_path / "run" / "bad.jsonl").read_text().splitlines()) == int(said[1])
    assert (tmp_path / "run" / "encoder.safetensors").is_file()
