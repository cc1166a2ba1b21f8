"""`kontrast pretrain FOLDER` decodes each image once, for training, its evaluation and the probes together."""

from __future__ import annotations

from collections import Counter

import pytest

from kontrast.cli import main as cli
from kontrast.data import decode, decode_workers, sources

from support.made_images import QUICK, folder_of


@pytest.mark.parametrize("classes", [1, 2])
def test_each_image_is_decoded_once(tmp_path, monkeypatch, classes):
    monkeypatch.setattr(sources, "_recent", type(sources._recent)())
    root, decoded = folder_of(tmp_path / "images", 60 // classes, classes), Counter()
    decode_file = decode_workers.decode_file

    def count(path, *rest):
        decoded[path] += 1
        return decode_file(path, *rest)

    monkeypatch.setattr(decode_workers, "decode_file", count)
    chosen = [text for text in QUICK if not text.startswith(("views.size", "evaluation.every"))]
    command = ["pretrain", str(root), *chosen, "evaluation.every=1", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert cli.run(command) == 0
    assert len(decoded) == 60 and set(decoded.values()) == {1}


def test_sizes_are_read_from_headers(tmp_path, monkeypatch):
    """The first look, which chooses the size of the views, decodes nothing."""
    root = folder_of(tmp_path / "images", 4, side=50)
    monkeypatch.setattr(decode, "pixels_of", lambda *_: pytest.fail("decoded"))
    assert sources.preview_data(root).side == 50


def test_an_image_that_changed_is_decoded_again(tmp_path):
    root = folder_of(tmp_path / "images", 3)
    before = sources.open_data(root)
    (root / "0001.png").write_bytes((root / "0002.png").read_bytes())
    after = sources.open_data(root)
    assert (after.images[1] == after.images[2]).all() and not (before.images[1] == after.images[1]).all()
