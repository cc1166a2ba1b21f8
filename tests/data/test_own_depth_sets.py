"""Sets that keep their own depth and channels: in memory, in stores, decoded lazily and by worker processes."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from kontrast.data import open_data, sources
from kontrast.data.decode_workers import decode_all
from kontrast.data.depth import common_form
from kontrast.data.in_memory import pack_in_memory
from kontrast.data.limits import Form, Limits
from kontrast.data.listing import held_out_clips, scan_folder
from kontrast.data.pack import pack
from kontrast.data.raw_image import Header
from kontrast.errors import DataError, EnvironmentFault, UsageError

from support.deep_pictures import bands, npy, tiff, write_bands


@pytest.fixture
def folder(tmp_path):
    return write_bands(tmp_path / "bands")


def test_five_channels_everywhere(folder, tmp_path, monkeypatch):
    """In memory, in a store that is written by hand, in one of the cache, and decoded lazily: the same values."""
    first = torch.from_numpy(bands(5, high=2000))
    whole = open_data(folder, "all")
    assert whole.images.shape == (24, 5, 20, 24) and whole.dtype == torch.uint16 and not whole.color
    assert torch.equal(whole[0], first)
    store = pack(folder, tmp_path / "store")[0]
    assert (store / "images.u16").stat().st_size == 2 * 5 * 20 * 24 * len(open_data(tmp_path / "store"))
    train = open_data(tmp_path / "store")
    assert (
        train.dtype == torch.uint16
        and not train.color
        and torch.equal(train[0], whole[whole.names.index(train.names[0])])
    )
    monkeypatch.setattr(sources, "_exceeds_memory", lambda *_: True)
    lazy = open_data(folder, "all", pack=False)
    assert torch.equal(lazy.batch(torch.arange(3))[0], whole[0:3])
    monkeypatch.setattr(sources, "IN_MEMORY", 2)
    cached = open_data(folder, "all")
    assert type(cached.images) is torch.Tensor and torch.equal(cached[:], whole[:])


def test_worker_processes_return_the_same_values(folder):
    items = [*scan_folder(str(folder)).items] * 25
    form = Form("uint16", 5)
    chunks = [chunk for _, chunk in decode_all(items, Limits(form=form), 256, workers=2)]
    images = [image for chunk in chunks for image in chunk.arrays(form)]
    assert len(images) == 600
    np.testing.assert_array_equal(images[-1], bands(5, seed=11, high=3500))


def test_images_of_different_sizes(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.tif").write_bytes(tiff(bands(4, 20 + number, 18).astype(np.float32)))
    images = open_data(tmp_path)
    pixels, sizes = images.batch(torch.tensor([5, 0]))
    assert pixels.dtype == torch.float32 and pixels.shape == (2, 4, 25, 18) and sizes.tolist() == [[25, 18], [20, 18]]
    assert torch.equal(pixels[0], torch.from_numpy(bands(4, 25, 18).astype(np.float32)))
    assert images[0:2].shape == (2, 4, 18, 18)


def gray16(value: int) -> Image.Image:
    return Image.fromarray(bands(1, seed=value)[0])


def test_when_the_depth_is_kept(tmp_path):
    """16-bit gray images keep theirs, unless there are ordinary pictures among them, a float_range, or the user."""
    for number in range(4):
        gray16(number).save(tmp_path / f"{number}.png")
    kept = open_data(tmp_path)
    assert (
        kept.channels == 1
        and kept.dtype == torch.uint16
        and torch.equal(kept[2][0], torch.from_numpy(bands(1, seed=2)[0]))
    )
    for more in ({"depth": "8-bit"}, {"float_range": [0, 1]}):
        plain = open_data(tmp_path, **more)
        assert plain.channels == 3 and plain.dtype == torch.uint8
    gray16(9).convert("L").save(tmp_path / "9.png")
    assert open_data(tmp_path).dtype == torch.uint8
    with pytest.raises(
        DataError, match=r"differ in form; of 5 there are 1 channel of uint16 \(4, such as 0.png\), 1 ch"
    ):
        open_data(tmp_path, depth="own")
    assert len(open_data(tmp_path, depth="own", max_bad=0.2)) == 4
    with pytest.raises(UsageError, match="depth can't be 'deep'"):
        open_data(tmp_path, depth="deep")


def test_gray_among_colors_and_channels_that_differ():
    def headers(*forms):
        return [(f"{i}.tif", Header(9, 9, form)) for i, form in enumerate(forms)]

    gray, colors, four = Form("uint16", 1), Form("uint16", 3), Form("uint16", 4, False)
    assert common_form(headers(gray, colors, gray), 0.05) == colors
    assert common_form(headers(*[four] * 20, gray), 0.05) == four
    with pytest.raises(
        DataError, match=r"4 channels of uint16 \(2, such as 0.tif\), 1 channel of uint16 \(1, such as 2"
    ):
        common_form(headers(four, four, gray), 0.05)


def test_bad_images_of_a_deep_set_are_counted(folder):
    (folder / "class0" / "000.npy").write_bytes(npy(bands(4)))
    images = open_data(folder, "train")
    assert ("class0/000.npy", "4 channels of uint16, the set has 5 channels of uint16") in images.bad
    for number in range(1, 8):
        (folder / "class0" / f"{number:03d}.npy").write_bytes(npy(np.zeros((5, 20, 24), np.uint16)))
    with pytest.raises(DataError, match=r"\d of 24 images in .* are bad.*constant: all pixels are equal.*--max-bad"):
        open_data(folder, "train")


def test_one_kind_of_files_is_read(tmp_path):
    """Arrays beside photos are other files, unless the user asks for them."""
    np.save(tmp_path / "0.npy", bands(5))
    gray16(0).convert("L").save(tmp_path / "photo.png")
    photos = open_data(tmp_path)
    assert photos.names == ["photo.png"] and photos.notes["other files"] == 1
    assert open_data(tmp_path, files="arrays").names == ["0.npy"]
    with pytest.raises(DataError, match=r"no images in .*: only 2 other files; allowed: dcm dicom, in upper"):
        open_data(tmp_path, files="dicom")


def test_16_bit_tensors_in_memory(tmp_path):
    pixels = torch.from_numpy(np.stack([bands(5, seed=i) for i in range(4)]))
    images = open_data(pack_in_memory(pixels, tmp_path / "store"))
    assert images.dtype == torch.uint16 and torch.equal(images[:], pixels)
    with pytest.raises(DataError, match="the images are float32; allowed: uint8"):
        pack_in_memory(pixels.float(), tmp_path / "floats")


def test_a_damaged_deep_store_is_packed_again(folder, tmp_path):
    store = pack(folder, tmp_path / "store", max_bad=0.1)[0]
    before = open_data(tmp_path / "store")[:].clone()
    with open(store / "images.u16", "r+b") as file:
        file.write(b"\xff" * 64)
    said = []
    again = open_data(tmp_path / "store", say=said.append)
    assert torch.equal(again[:], before) and "packed again" in said[0]
    manifest = json.loads((store / "store.json").read_bytes())
    assert manifest["dtype"] == "uint16" and manifest["color"] is False and manifest["channels"] == 5


@pytest.mark.parametrize(
    "package, name, words", [("pydicom", "scan.dcm", r"pip install \"kontrast\[dicom\]\""), ("av", "clip.mp4", "video")]
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, package, name, words):
    (tmp_path / name).write_bytes(bytes(128) + b"DICM")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvironmentFault, match=words):
        open_data(tmp_path)


def test_frames_of_a_video_are_never_divided():
    names = [f"{clip}.mp4#t={time}.0" for clip in "abcdefghij" for time in range(1, 8)]
    labels = np.repeat([0, 1], 35)
    held = held_out_clips(names, labels, 0.4).reshape(10, 7)
    assert (held.all(1) == held.any(1)).all()
    assert held[:5, 0].sum() == held[5:, 0].sum() == 2
