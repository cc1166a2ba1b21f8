"""Read DICOM files with pydicom, an extra: gray values as the modality means them, or colors.

Gray values become floats after rescale slope and intercept (Hounsfield units, for example); MONOCHROME1, in which high
values are dark, is inverted; of several frames the first is read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from kontrast.data.limits import BadImage, Form, Limits
from kontrast.data.raw_image import Header, RawImage
from kontrast.errors import EnvironmentFault

GRAY = ("MONOCHROME1", "MONOCHROME2")


def matches(head: bytes) -> bool:
    return head[128:132] == b"DICM"


def require_pydicom() -> Any:
    """pydicom, or an error that says how to install it."""
    try:
        import pydicom
        import pydicom.pixels
    except ImportError:
        raise EnvironmentFault('DICOM files need pydicom: pip install "kontrast[dicom]"') from None
    return pydicom


def read_header(source: BinaryIO, limits: Limits) -> Header:
    with _quietly():
        return _header(require_pydicom().dcmread(source, stop_before_pixels=True))


def _header(found: Any) -> Header:
    kind, samples = str(found.get("PhotometricInterpretation", "")), int(found.get("SamplesPerPixel", 1))
    if "Rows" not in found or "Columns" not in found:
        raise BadImage("a DICOM file without an image")
    gray = kind in GRAY and samples == 1
    if not gray and (samples != 3 or int(found.get("BitsAllocated", 8)) != 8):
        raise BadImage(f"DICOM image of {samples} samples of {kind or 'unknown meaning'}; allowed: gray, 8-bit color")
    return Header(int(found.Columns), int(found.Rows), Form("float32", 1) if gray else Form(), not gray)


def read_raw(source: BinaryIO, limits: Limits) -> RawImage:
    pydicom = require_pydicom()
    with _quietly():
        found = pydicom.dcmread(source)
        header = _header(found)
        limits.check_size(header.width, header.height)
        values = _first_frame(pydicom, found, raw=header.form.dtype == "float32")
        if header.form.dtype == "uint8":
            pixels: np.ndarray = values.transpose(2, 0, 1).astype(np.uint8)
        else:
            if found.PhotometricInterpretation == "MONOCHROME1":
                bits, signed = int(found.BitsStored), int(found.get("PixelRepresentation", 0))
                values = (-1 if signed else 2**bits - 1) - values.astype(np.int64)
            slope, intercept = float(found.get("RescaleSlope", 1) or 1), float(found.get("RescaleIntercept", 0) or 0)
            pixels = (values.astype(np.float64) * slope + intercept).astype(np.float32)[None]
    several = int(found.get("NumberOfFrames", 1) or 1) > 1
    return RawImage(np.ascontiguousarray(pixels), color=True, note="first frame" if several else "")


def _first_frame(pydicom: Any, found: Any, raw: bool) -> np.ndarray:
    """The first frame, [h,w] of gray or [h,w,3] of RGB."""
    syntax = getattr(getattr(found, "file_meta", None), "TransferSyntaxUID", None)
    if syntax is None:
        raise BadImage("damaged: the DICOM file does not say how its pixels are stored")
    if "PixelData" not in found and not {"FloatPixelData", "DoubleFloatPixelData"} & set(found.dir()):
        raise BadImage("damaged: the DICOM file ends before its pixels")
    if syntax.is_encapsulated:
        try:
            decoder = pydicom.pixels.get_decoder(syntax)
        except NotImplementedError:
            raise BadImage(f"DICOM transfer syntax {syntax.name}, which pydicom can't decode") from None
        if not decoder.is_available:
            needs = "; ".join(decoder.missing_dependencies)
            raise BadImage(f"DICOM transfer syntax {syntax.name} needs another package: {needs}")
    return pydicom.pixels.pixel_array(found, index=0, raw=raw)


@contextmanager
def _quietly() -> Iterator[None]:
    """pydicom warns about odd files, which are read anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
