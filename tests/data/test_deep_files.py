"""TIFF, PNG and NumPy files of any depth and number of channels: the very values, or one clear line."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from kontrast.data.decode import decode
from kontrast.data.limits import BadImage, Form, Limits
from kontrast.data.png_files import undo_filters

from support.deep_pictures import bands, deep_png, npy, npy_header, tiff

DEEP = bands(5)


def own(content: bytes, form: tuple, **more) -> np.ndarray:
    return decode(content, Limits(form=Form(*form), **more))[0]


@pytest.mark.parametrize(
    "how",
    [
        {}, {"order": ">"}, {"big": True}, {"big": True, "order": ">"}, {"separate": True}, {"tile": 16},
        {"tile": 16, "separate": True, "compression": 8}, {"compression": 8}, {"compression": 8, "predictor": 2},
        {"predictor": 2, "order": ">"}, {"photometric": 2, "extra": (0, 0)}, {"rows": 1},
    ],
)  # fmt: skip
def test_tiff_of_five_channels_of_16_bits(how):
    np.testing.assert_array_equal(own(tiff(DEEP, **how), ("uint16", 5)), DEEP)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int16", "int32", "uint32", "int8"])
@pytest.mark.parametrize("order", "<>")
def test_other_tiff_values_become_float32(dtype, order):
    values = (DEEP[:2].astype(np.float64) / 40 - 20).astype(dtype)
    how = {"compression": 8, "predictor": 3 if values.dtype.kind == "f" else 2}
    np.testing.assert_array_equal(own(tiff(values, order=order, **how), ("float32", 2)), values.astype(np.float32))


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_deflate", "packbits", "zstd", "lzma"])
def test_tiff_files_of_pillow(compression):
    file = io.BytesIO()
    Image.fromarray(DEEP[0]).save(file, "TIFF", compression=compression)
    np.testing.assert_array_equal(own(file.getvalue(), ("uint16", 1)), DEEP[:1])


def test_pages_are_channels_if_the_user_says_so():
    content = tiff(DEEP, pages=5)
    pixels, note = decode(content, Limits(form=Form("uint16", 1)))
    np.testing.assert_array_equal(pixels, DEEP[:1])
    assert "data.pages=channels" in note
    np.testing.assert_array_equal(own(content, ("uint16", 5), pages="channels"), DEEP)


def test_tiff_opacity_is_put_on_white_and_white_can_be_zero():
    opaque = np.concatenate([DEEP[:3], np.full_like(DEEP[:1], 65_535)])
    np.testing.assert_array_equal(own(tiff(opaque, photometric=2, extra=(2,)), ("uint16", 3)), DEEP[:3])
    clear = opaque.copy()
    clear[3, :, :12] = 0
    mixed = own(tiff(clear, photometric=2, extra=(2,)), ("uint16", 3))
    assert (mixed[:, :, :12] == 65_535).all() and (mixed[:, :, 12:] == DEEP[:3, :, 12:]).all()
    np.testing.assert_array_equal(own(tiff(DEEP[:1], photometric=0), ("uint16", 1)), 65_535 - DEEP[:1])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_as_pillow_applies_it(orientation):
    small = (DEEP[:1] // 16).astype(np.uint8)
    content = tiff(small, orientation=orientation)
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        np.testing.assert_array_equal(own(content, ("uint8", 1))[0], np.asarray(image))


@pytest.mark.parametrize("filters", [(0,), (1,), (2,), (3,), (4,), (0, 1, 2, 3, 4)])
def test_png_of_16_bit_colors(filters):
    content = deep_png(DEEP[:3], filters)
    np.testing.assert_array_equal(own(content, ("uint16", 3)), DEEP[:3])
    with Image.open(io.BytesIO(content)) as image:  # Pillow keeps the upper 8 bits
        np.testing.assert_array_equal(np.asarray(image).transpose(2, 0, 1), DEEP[:3] >> 8)


def test_png_filters_of_8_bit_pictures_as_pillow_undoes_them():
    """Filters of a file that Pillow wrote: on photographs it uses all of them."""
    import struct
    import zlib

    picture = np.random.default_rng(0).integers(0, 90, (13, 17, 3), dtype=np.uint8).cumsum(0).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    content, place, packed = file.getvalue(), 8, b""
    while place < len(content):
        length, name = struct.unpack_from(">I4s", content, place)
        packed += content[place + 8 : place + 8 + length] if name == b"IDAT" else b""
        place += 12 + length
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(13, -1)
    assert len(set(rows[:, 0].tolist())) > 1
    np.testing.assert_array_equal(undo_filters(rows[:, 1:], rows[:, 0], 3).reshape(picture.shape), picture)


def test_axes_of_arrays():
    for array, layout in ((DEEP, "auto"), (DEEP.transpose(1, 2, 0), "auto"), (np.asfortranarray(DEEP), "CHW")):
        np.testing.assert_array_equal(own(npy(array), ("uint16", 5), layout=layout), DEEP)
    cube = bands(8, 8, 8)
    with pytest.raises(BadImage, match=r"\[8, 8, 8\]: both ends could be channels; state data.layout=HWC or"):
        own(npy(cube), ("uint16", 8))
    np.testing.assert_array_equal(own(npy(cube), ("uint16", 8), layout="CHW"), cube)
    np.testing.assert_array_equal(own(npy(cube), ("uint16", 8), layout="HWC"), cube.transpose(2, 0, 1))
    with pytest.raises(BadImage, match=r"neither end has at most 16 channels; state data.layout"):
        own(npy(np.ones((20, 20, 30))), ("float32", 20))


def test_npz_has_one_array_or_one_called_image():
    for arrays in ({"a": DEEP}, {"image": DEEP, "mask": DEEP[0]}):
        file = io.BytesIO()
        np.savez_compressed(file, **arrays)
        np.testing.assert_array_equal(own(file.getvalue(), ("uint16", 5)), DEEP)
    file = io.BytesIO()
    np.savez(file, a=DEEP, b=DEEP)
    with pytest.raises(BadImage, match=r"2 arrays \(a, b\)"):
        own(file.getvalue(), ("uint16", 5))


PNG = deep_png(DEEP[:3])
BAD = {
    "an array of Python objects, which is never unpickled": npy(np.array([[{}, 1]], dtype=object), allow_pickle=True),
    "NaN or infinite values": npy(np.where(DEEP > 2000, np.nan, DEEP).astype(np.float32)),
    "constant: all pixels are equal": npy(np.full((5, 20, 20), 7, np.uint16)),
    "5 channels of uint16, the set has 4 channels of uint16": npy(DEEP),
    "4 channels of uint8, the set has 4 channels of uint16": npy((DEEP[:4] // 16).astype(np.uint8)),
    "30000 x 30000 pixels; allowed": npy_header((4, 30_000, 30_000)),
    "damaged: the array ends too early": npy(DEEP[:4])[:-1],
    "values of type <U1": npy(np.full((9, 9), "x")),
    r"array of shape \[2, 2, 2, 2\]": npy(np.ones((2, 2, 2, 2))),
    "damaged: the TIFF file ends too early": tiff(DEEP[:4])[:300],
    "TIFF compression 7 of deep values; allowed": tiff(DEEP[:4], compression=7),
    "damaged: wrong checksum in the PNG file": PNG[:-16] + bytes(4) + PNG[-12:],
}  # fmt: skip


@pytest.mark.parametrize("reason", BAD)
def test_bad_files_have_one_clear_reason(reason):
    with pytest.raises(BadImage, match=reason) as caught:
        own(BAD[reason], ("float32", 5) if "NaN" in reason else ("uint16", 5 if "constant" in reason else 4))
    assert "\n" not in caught.value.reason


def test_gray_among_colors_is_repeated():
    pixels = own(npy(DEEP[0]), ("uint16", 3))
    assert pixels.shape == (3, 20, 24) and (pixels == DEEP[0]).all()


def test_reducing_keeps_the_depth():
    for values, form in ((DEEP, ("uint16", 5)), (DEEP.astype(np.float32), ("float32", 5))):
        small = own(npy(values), form, bound=10)
        assert small.shape == (5, 10, 12) and small.dtype == form[0]
        averaged = values.reshape(5, 10, 2, 12, 2).mean((2, 4))
        assert abs(small - averaged).mean() < 0.03 * averaged.mean()


def test_conversion_to_8_bits():
    """16-bit values are divided by 257, floats need their range, and more than three channels have no such form."""
    gray = decode(npy(DEEP[0]))[0]
    np.testing.assert_array_equal(gray, np.broadcast_to((DEEP[0].astype(int) + 128) // 257, (3, 20, 24)))
    picture = (DEEP[:3] // 16).astype(np.uint8)
    np.testing.assert_array_equal(decode(npy(picture))[0], picture)
    np.testing.assert_array_equal(decode(npy(picture.transpose(1, 2, 0)))[0], picture)
    floats = npy((picture / 255).astype(np.float32))
    with pytest.raises(BadImage, match="float_range"):
        decode(floats)
    np.testing.assert_array_equal(decode(floats, Limits(float_range=(0.0, 1.0)))[0], picture)
    with pytest.raises(BadImage, match=r"5 channels can't become red, green and blue: data.depth=own"):
        decode(tiff(DEEP))
