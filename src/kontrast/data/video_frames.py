"""Frames of videos, one every few seconds, read with PyAV, an extra. A frame is named `clip.mp4#t=12.0`.

The frame at a time is the last one that begins no later, wherever decoding starts: the same frame every time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from PIL import Image

from kontrast.data.limits import BadImage
from kontrast.errors import EnvironmentFault, UsageError

SUFFIXES = (".mp4", ".avi", ".mkv", ".mov", ".webm")
MOST_FRAMES = 1_000_000
_FRAME = re.compile(r"(.+\.(?:mp4|avi|mkv|mov|webm))#t=(\d+\.\d+)", re.IGNORECASE | re.DOTALL)


def frame_name(clip: str, time: float) -> str:
    return f"{clip}#t={time}"


def split_frame(name: str) -> tuple[str, float | None]:
    """The video and the time of a frame by its name or path; the name itself and None for anything else."""
    found = _FRAME.fullmatch(name)
    return (found[1], float(found[2])) if found else (name, None)


def require_av() -> Any:
    """PyAV, or an error that says how to install it."""
    try:
        import av
    except ImportError:
        raise EnvironmentFault('videos need PyAV: pip install "kontrast[video]"') from None
    av.logging.set_level(None)
    return av


@contextmanager
def _opened(source: BinaryIO) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream; what FFmpeg can't read becomes `BadImage`."""
    av = require_av()
    try:
        with av.open(source) as container:
            if not container.streams.video:
                raise BadImage("a file without a video stream")
            yield container, container.streams.video[0]
    except av.FFmpegError as error:
        raise BadImage(f"damaged, or no video: {error.strerror}") from None


def frame_times(source: BinaryIO, every: float) -> list[float]:
    """The times of a video's frames in seconds, from its header: 0, `every`, 2 `every`, ... before its end."""
    if not every > 0:
        raise UsageError(f"data.every is {every}: give the seconds between two frames of a video, such as 2")
    with _opened(source) as (container, stream):
        if stream.duration is not None and stream.time_base is not None:
            duration = float(stream.duration * stream.time_base)
        else:
            duration = (container.duration or 0) / 1e6
    count = max(1, math.ceil(duration / every - 1e-6))
    if count > MOST_FRAMES:
        raise BadImage(f"{count:,} frames in {duration:,.0f} s; allowed: {MOST_FRAMES:,}; raise data.every")
    return [round(number * every, 3) for number in range(count)]


def frame_size(source: BinaryIO) -> tuple[int, int]:
    """Width and height of the frames, before they are turned."""
    with _opened(source) as (_, stream):
        return stream.codec_context.width, stream.codec_context.height


def read_frame(source: BinaryIO, time: float) -> Image.Image:
    """The frame that is shown at a time, as an RGB picture that is turned as the video says."""
    with _opened(source) as (container, stream):
        stream.thread_type = "SLICE"  # decoding processes share the cores
        found = _seek(container, stream, time)
        if found is None:
            raise BadImage(f"the video ends before {time:g} s")
        picture = found.to_image()
        turned = int(getattr(found, "rotation", 0) or 0) % 360
    quarter = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
    return picture.transpose(quarter[turned]) if turned in quarter else picture


def _seek(container: Any, stream: Any, time: float) -> Any:
    """Decode from the last key frame up to a time: the last frame that begins no later, or None if there is none."""
    start = stream.start_time or 0
    wanted = start + math.floor(time / float(stream.time_base) + 1e-3)  # times are whole milliseconds
    if time > 0:
        container.seek(wanted, stream=stream)
    found, later = None, False
    for frame in container.decode(stream):
        if frame.pts is None:
            continue
        if frame.pts > wanted:
            later = True
            break
        found = frame
    if found is None or later or time == 0:
        return found
    # The last frame lasts until the next would begin; after that, the video has ended early.
    rate = float(stream.average_rate or 0)
    ends = found.pts + (found.duration or (1 / rate / float(stream.time_base) if rate else 0))
    return found if wanted < ends + 1 else None
