"""Say before images are packed how long it will take and how large the store will be, and refuse if it won't fit."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from kontrast.data.decode import decode_file
from kontrast.data.limits import BadImage, Limits
from kontrast.data.listing import Listing
from kontrast.data.source_files import Options
from kontrast.data.store import PIXELS
from kontrast.errors import EnvironmentFault
from kontrast.operating_system import usable_cores

SAMPLED = 24
"""Images that are decoded to learn rate and size."""


def announce_packing(found: Listing, folder: Path, options: Options) -> None:
    """Tell the user what packing a listing into `folder` will take; raise if the store won't fit on the disk."""
    rate, each = sample_decoding(found, options.limits)
    if not rate:
        return  # none of the sample can be read, which packing reports
    count, workers = len(found.items), options.workers or usable_cores()
    whole, free = each * count, _room(folder, PIXELS[options.limits.made.dtype])
    seconds = count / (rate * workers)
    if whole > free:
        raise EnvironmentFault(
            f"packing {count:,} images takes about {whole / 1e9:,.1f} GB, but {free / 1e9:,.1f} GB are free at "
            f"{folder}: set KONTRAST_CACHE to a larger disk, give a smaller data.size, or decode as you train with "
            "data.pack=false"
        )
    if options.say is not None:
        options.say(
            f"packing {count:,} images once: about {rate * workers:,.0f} images/s on {workers} cores, "
            f"{whole / 1e9:,.1f} GB in {folder.parent}, first step in {_duration(seconds)}; "
            "data.pack=false starts at once and decodes as it trains"
        )


def sample_decoding(found: Listing, limits: Limits) -> tuple[float, float]:
    """Images that one core decodes in a second, and bytes per decoded image; zeros if none is readable."""
    count, total, read = min(SAMPLED, len(found.items)), 0, 0
    start = time.thread_time()
    for number in range(count):
        item = found.items[number * len(found.items) // count]
        with contextlib.suppress(BadImage):
            total += decode_file(item.path, item.offset, item.length, limits)[0].nbytes
            read += 1
    return (read / max(time.thread_time() - start, 1e-9), total / read) if read else (0.0, 0.0)


def _room(folder: Path, pixels: str) -> int:
    """Bytes that are free for a store, including those of an interrupted packing, which goes on."""
    place = folder
    while not place.is_dir() and place != place.parent:
        place = place.parent
    begun = folder.with_name(folder.name + ".part") / pixels
    return shutil.disk_usage(place).free + (os.path.getsize(begun) if begun.is_file() else 0)


def _duration(seconds: float) -> str:
    return f"about {seconds / 60:,.0f} minutes" if seconds > 90 else f"about {seconds:,.0f} s"
