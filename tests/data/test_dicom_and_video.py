"""DICOM files and videos, with pydicom and PyAV, which are extras."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kontrast.data import open_data
from kontrast.data.decode import decode, decode_file, list_frames
from kontrast.data.limits import BadImage, Form, Limits

from support.deep_pictures import bands

STORED = bands(1, high=3000)[0]
UNITS = Limits(form=Form("float32", 1))


def write_dicom(path: Path, values: np.ndarray, syntax: str = "1.2.840.10008.1.2.1", **elements) -> bytes:
    pydicom = pytest.importorskip("pydicom")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = syntax, "1.2.840.10008.5.1.4.1.1.2"
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    file = pydicom.dataset.FileDataset(str(path), {}, file_meta=meta, preamble=bytes(128))
    file.Rows, file.Columns = values.shape[-2:] if values.shape[-1] != 3 else values.shape[-3:-1]
    file.SOPClassUID, file.SOPInstanceUID = meta.MediaStorageSOPClassUID, "1.2.3"
    usual = {"SamplesPerPixel": 1, "PhotometricInterpretation": "MONOCHROME2", "BitsAllocated": 16, "BitsStored": 12,
             "HighBit": 11, "PixelRepresentation": 0, "PixelData": values.tobytes()}  # fmt: skip
    for name, value in (usual | elements).items():
        setattr(file, name, value)
    file.save_as(path, enforce_file_format=True)
    return path.read_bytes()


def test_dicom_values_are_rescaled_and_monochrome1_is_inverted(tmp_path):
    path = tmp_path / "scan.dcm"
    scaled = write_dicom(path, STORED, RescaleSlope=2, RescaleIntercept=-1024)
    np.testing.assert_array_equal(decode(scaled, UNITS)[0][0], STORED * np.float32(2) - 1024)
    inverted = write_dicom(path, STORED, PhotometricInterpretation="MONOCHROME1")
    np.testing.assert_array_equal(decode(inverted, UNITS)[0][0], 4095 - STORED.astype(np.float32))
    window = decode(scaled, Limits(float_range=(-1024, 5000)))[0]
    assert window.dtype == np.uint8 and abs(window[0] - (STORED * 2.0) / 6024 * 255).max() <= 0.5001
    signed = write_dicom(path, STORED.astype(np.int16) - 2000, PixelRepresentation=1, BitsStored=16, HighBit=15)
    np.testing.assert_array_equal(decode(signed, UNITS)[0][0], STORED.astype(np.float32) - 2000)


def test_first_frame_and_colors_of_dicom(tmp_path):
    frames = np.stack([STORED, STORED // 2])
    pixels, note = decode(write_dicom(tmp_path / "two.dcm", frames, NumberOfFrames=2), UNITS)
    assert note == "first frame"
    np.testing.assert_array_equal(pixels[0], STORED.astype(np.float32))
    color = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    content = write_dicom(
        tmp_path / "color.dcm", color, SamplesPerPixel=3, PhotometricInterpretation="RGB", BitsAllocated=8,
        BitsStored=8, HighBit=7, PlanarConfiguration=0,
    )  # fmt: skip
    np.testing.assert_array_equal(decode(content)[0], color.transpose(2, 0, 1))


def test_bad_dicom_files(tmp_path):
    whole = write_dicom(tmp_path / "scan.dcm", STORED)
    with pytest.raises(BadImage, match="damaged"):
        decode(whole[:-400], UNITS)
    with pytest.raises(BadImage, match="damaged: the DICOM file ends before its pixels"):
        decode(whole[: whole.index(STORED.tobytes()) - 12], UNITS)
    no_decoder = whole.replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.4.100\0"[:20])
    with pytest.raises(BadImage):
        decode(no_decoder, UNITS)
    mpeg = write_dicom(tmp_path / "mpeg.dcm", STORED)
    pydicom = pytest.importorskip("pydicom")
    file = pydicom.dcmread(tmp_path / "mpeg.dcm")
    file.file_meta.TransferSyntaxUID = pydicom.uid.MPEG2MPML
    file.PixelData = pydicom.encaps.encapsulate([mpeg[:100]])
    file["PixelData"].is_undefined_length = True
    file.save_as(tmp_path / "mpeg.dcm", enforce_file_format=True)
    with pytest.raises(BadImage, match=r"DICOM transfer syntax MPEG2 .*, which pydicom can't decode"):
        decode_file(str(tmp_path / "mpeg.dcm"), limits=UNITS)


def test_a_folder_of_dicom_files(tmp_path):
    for number in range(3):
        write_dicom(tmp_path / f"{number}.dcm", STORED + number)
    images = open_data(tmp_path)
    assert images.dtype == torch.float32 and images.channels == 1
    assert torch.equal(images[2][0], torch.from_numpy(STORED.astype(np.float32)) + 2)


def write_video(path: Path, seconds: int = 4, rate: int = 5, audio: bool = False) -> Path:
    """A video whose frames get brighter, 10 levels a frame."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as out:
        if audio:
            sound = out.add_stream("pcm_s16le", rate=8000)
            frame = av.AudioFrame(format="s16", layout="mono", samples=800)
            frame.sample_rate = 8000
            for packet in [*sound.encode(frame), *sound.encode()]:
                out.mux(packet)
            return path
        stream = out.add_stream("mpeg4", rate=rate)
        stream.width = stream.height = 48
        stream.pix_fmt, stream.gop_size = "yuv420p", 8
        for number in range(seconds * rate):
            frame = np.full((48, 48, 3), 20 + 10 * number, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)
    return path


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi"])
def test_frames_by_time(tmp_path, suffix):
    """A frame is the one that is shown at its time, in whatever order frames are asked for."""
    clip = str(write_video(tmp_path / f"clip.{suffix}"))
    assert list_frames(clip, 1.5) == [0.0, 1.5, 3.0]
    for time, number in ((3.0, 15), (0.0, 0), (1.5, 7), (0.2, 1), (3.79, 18)):
        pixels, _ = decode_file(f"{clip}#t={time}")
        assert pixels.shape == (3, 48, 48) and abs(int(np.median(pixels)) - (20 + 10 * number)) < 5, time


def test_a_folder_of_videos_is_divided_by_clip(tmp_path):
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(3):
            write_video(tmp_path / label / f"{number}.mp4")
    train, test = (open_data(tmp_path, split, every=2.0, test_share=0.34) for split in ("train", "test"))
    clips = [{name.partition("#")[0] for name in part.names} for part in (train, test)]
    assert not clips[0] & clips[1] and len(clips[0]) == 4 and len(clips[1]) == 2
    assert len(train) == 8 and train.names[1] == train.names[0].replace("#t=0.0", "#t=2.0")
    assert train.channels == 3 and train.dtype == torch.uint8


def test_bad_videos(tmp_path):
    whole = write_video(tmp_path / "whole.avi").read_bytes()
    (tmp_path / "cut.avi").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadImage, match=r"the video ends before 3 s|damaged, or no video: Invalid data"):
        decode_file(f"{tmp_path / 'cut.avi'}#t=3.0")
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(BadImage, match="damaged, or no video"):
        list_frames(str(tmp_path / "text.mp4"), 1.0)
    with pytest.raises(BadImage, match="a file without a video stream"):
        list_frames(str(write_video(tmp_path / "sound.mkv", audio=True)), 1.0)
    images = open_data(tmp_path, max_bad=0.5, every=1.0)
    assert {name for name, _ in images.bad} >= {"sound.mkv", "text.mp4"}
