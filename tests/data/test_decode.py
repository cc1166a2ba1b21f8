"""Every image mode is converted as documented, and every kind of damage is reported."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from PIL import Image

from kontrast.data import decode as decode_module
from kontrast.data.decode import BadImage, Limits, decode, decode_file
from kontrast.errors import Stopped
from kontrast.training.signals import Cut, StopSignals

from support.made_images import encoded

RAMP = np.linspace(0, 255, 32 * 24).reshape(24, 32).astype(np.uint8)


@pytest.mark.parametrize(
    ("form", "slack"), [("PNG", 0), ("BMP", 0), ("TIFF", 0), ("GIF", 0), ("WEBP", 12), ("JPEG", 12)]
)
def test_every_format_is_decoded(form, slack):
    pixels, note = decode(encoded(Image.fromarray(RAMP), form))
    assert pixels.shape == (3, 24, 32) and pixels.dtype == np.uint8 and note == ""
    assert np.abs(pixels.astype(int) - RAMP).max() <= slack


def test_sixteen_bit_gray_is_scaled_and_not_clipped():
    deep = (RAMP.astype(np.uint16) * 257).astype(np.uint16)
    for form in ("PNG", "TIFF"):
        pixels, _ = decode(encoded(Image.fromarray(deep), form))
        np.testing.assert_array_equal(pixels[0], RAMP)


def test_float_images_need_a_range():
    content = encoded(Image.fromarray((RAMP / 255).astype(np.float32)), "TIFF")
    with pytest.raises(BadImage, match="float_range"):
        decode(content)
    pixels, _ = decode(content, Limits(float_range=(0.0, 1.0)))
    assert np.abs(pixels[0].astype(int) - RAMP).max() <= 1


def test_nan_values_are_refused():
    values = np.full((4, 4), np.nan, dtype=np.float32)
    with pytest.raises(BadImage, match="NaN"):
        decode(encoded(Image.fromarray(values), "TIFF"), Limits(float_range=(0.0, 1.0)))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_images_are_put_on_white(mode):
    clear = Image.new(mode, (6, 6), (0, 0, 0, 0) if mode == "RGBA" else (0, 0))
    half = Image.new(mode, (6, 6), (0, 0, 0, 128) if mode == "RGBA" else (0, 128))
    assert decode(encoded(clear, "PNG"))[0].min() == 255
    assert abs(int(decode(encoded(half, "PNG"))[0][0, 0, 0]) - 127) <= 1


def test_palette_transparency_one_bit_and_cmyk_are_converted():
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30] + [0] * 762)
    np.testing.assert_array_equal(decode(encoded(palette, "PNG"))[0][:, 0, 0], [10, 200, 30])
    assert decode(encoded(palette, "PNG", transparency=1))[0].min() == 255
    assert decode(encoded(Image.new("1", (4, 4), 1), "PNG"))[0].min() == 255
    red = decode(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"))[0][:, 8, 8].astype(int)
    assert red[0] > 240 and red[1] < 15 and red[2] < 15


def test_exif_rotation_is_applied_with_and_without_a_bound():
    wide = Image.fromarray(np.concatenate([np.zeros((40, 60), np.uint8), np.full((40, 60), 255, np.uint8)], axis=1))
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(wide, "JPEG", exif=exif, quality=95)
    for limits, shape in ((Limits(), (3, 120, 40)), (Limits(bound=20), (3, 60, 20))):
        pixels, note = decode(content, limits)
        assert pixels.shape == shape and note == "turned"
        assert pixels[0, :10].max() < 40 and pixels[0, -10:].min() > 215


@pytest.mark.parametrize("form", ["TIFF", "PNG", "WEBP"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_rotation_is_applied_once_in_every_format(form, turn):
    """Pillow rotates a TIFF itself when it loads it."""
    exif = Image.Exif()
    exif[0x0112] = turn
    pixels, note = decode(encoded(Image.fromarray(RAMP), form, exif=exif, lossless=True))
    upright = (RAMP, RAMP[:, ::-1], RAMP[::-1, ::-1], RAMP[::-1])
    expected = (*upright, RAMP.T, RAMP[::-1].T, RAMP[::-1, ::-1].T, RAMP[:, ::-1].T)[turn - 1]
    np.testing.assert_array_equal(pixels[0], expected)
    assert note == ("turned" if turn > 1 else "")


def test_the_first_frame_of_an_animation_is_used_and_counted():
    frames = [Image.new("L", (8, 8), level) for level in (40, 200)]
    for form in ("GIF", "TIFF"):
        pixels, note = decode(encoded(frames[0], form, save_all=True, append_images=frames[1:]))
        assert note == "first frame" and abs(int(pixels[0, 0, 0]) - 40) <= 1


def test_a_bound_reduces_the_shorter_side_and_never_enlarges():
    photograph = Image.fromarray(np.tile(RAMP, (20, 20)))
    assert decode(encoded(photograph, "JPEG"), Limits(bound=120))[0].shape == (3, 120, 160)
    assert decode(encoded(Image.fromarray(RAMP), "PNG"), Limits(bound=120))[0].shape == (3, 24, 32)


def test_one_pixel_is_an_image():
    assert decode(encoded(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG"))[0].ravel().tolist() == [9, 8, 7]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (b"just some words\n", "text"),
        (b"PK\x03\x04" + b"\0" * 50, "zip"),
        (bytes(range(128, 250)), "unknown"),
    ],
)
def test_the_error_says_what_a_file_is_instead_of_an_image(content, words):
    with pytest.raises(BadImage, match=words):
        decode(content)


def test_a_truncated_image_is_bad():
    content = encoded(Image.fromarray(np.tile(RAMP, (8, 8))), "JPEG")
    with pytest.raises(BadImage, match="damaged"):
        decode(content[: len(content) // 2])


def test_a_missing_file_has_its_errno(tmp_path):
    with pytest.raises(BadImage) as caught:
        decode_file(str(tmp_path / "gone.png"))
    assert caught.value.errno == 2


def test_a_signal_while_decoding_does_not_make_the_image_bad(monkeypatch):
    """Whatever the signal handler raises is passed on."""
    content = encoded(Image.fromarray(RAMP), "PNG")
    read = decode_module.pixels_of

    def asked_to_stop(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return read(*arguments)

    def handler(*_):
        raise Stopped("asked to")

    monkeypatch.setattr(decode_module, "pixels_of", asked_to_stop)
    with pytest.raises(Stopped, match="nothing is lost"), StopSignals("nothing is lost"):
        decode(content)
    with pytest.raises(Cut), StopSignals() as stop:
        stop.patient = True
        with stop.cutting():
            decode(content)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(Stopped, match="asked to"):
            decode(content)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_named_pipe_is_refused_without_waiting(tmp_path):
    """If the test fails, the pipe is opened at the other end after ten seconds, so that the test does not hang."""
    path = tmp_path / "image.png"
    os.mkfifo(path)
    writer = threading.Timer(10, os.open, (path, os.O_RDWR))
    writer.start()
    with pytest.raises(BadImage, match="not a regular file") as caught:
        decode_file(str(path))
    assert caught.value.errno is None and not writer.finished.is_set()
    writer.cancel()


def test_a_device_is_not_read(tmp_path):
    """Reading /dev/zero would never end."""
    (tmp_path / "image.png").symlink_to("/dev/null")
    with pytest.raises(BadImage, match="not a regular file"):
        decode_file(str(tmp_path / "image.png"))
