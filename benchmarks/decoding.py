"""Decode 500 pictures of 100x100 to 6,000x4,000 pixels for a batch: images per second and core, and peak memory.

    python benchmarks/decoding.py [--images 500] [--batch 256] [--view 224] [--folder DIR] [--table FILE]

Beside kontrast: Pillow's bare draft decode to the same size (nothing is resized or converted), Pillow's whole decode,
and torchvision's. Every rate is of one core and counts its processor time, so that other work matters little.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from kontrast.data.decode import Limits, decode

SMALLEST, LARGEST = (100, 100), (6000, 4000)


def make_pictures(root: Path, count: int) -> None:
    """JPEGs with areas spread evenly in their logarithm, landscape and portrait, with the detail of a photo."""
    generator = np.random.default_rng(0)
    root.mkdir(parents=True)
    low, high = (math.log(w * h) for w, h in (SMALLEST, LARGEST))
    for number in range(count):
        area = math.exp(low + (high - low) * number / (count - 1))
        ratio = float(generator.choice([1, 4 / 3, 3 / 2]))
        width, height = min(6000, round(math.sqrt(area * ratio))), min(4000, round(math.sqrt(area / ratio)))
        if number % 3 == 2 and width <= 4000:
            width, height = height, width
        rows, columns = max(2, height // 12), max(2, width // 12)
        small = Image.fromarray(generator.integers(0, 256, (rows, columns, 3), dtype=np.uint8))
        small.resize((width, height), Image.Resampling.BICUBIC).save(root / f"{number:04d}.jpg", quality=88)


def bare(content: bytes, limits: Limits) -> None:
    image = Image.open(io.BytesIO(content), formats=["JPEG"])
    if (wanted := limits.fit(*image.size)) != image.size:
        image.draft(None, wanted)
    image.load()


def resized(content: bytes, limits: Limits) -> None:
    """What a user of Pillow writes for the same result: decode with draft, convert, resize and make an array."""
    image = Image.open(io.BytesIO(content))
    image.draft(None, limits.fit(*image.size))
    picture = image.convert("RGB").resize(limits.fit(*image.size), Image.Resampling.BICUBIC)
    np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))


def torchvision_way(content: bytes, limits: Limits) -> None:
    from torch import frombuffer, uint8
    from torchvision.io import decode_jpeg
    from torchvision.transforms.v2.functional import resize

    pixels = decode_jpeg(frombuffer(bytearray(content), dtype=uint8))
    width, height = limits.fit(pixels.shape[2], pixels.shape[1])
    resize(pixels, [height, width], antialias=True)


def rates(contents: list[bytes], limits: Limits) -> dict[str, float]:
    """Images per second of processor time, each way."""
    ways: dict[str, Callable[[bytes, Limits], object]] = {
        "Pillow, bare draft decode": bare, "kontrast": decode, "Pillow: draft, convert, resize, array": resized,
        "Pillow, whole decode": lambda content, _: Image.open(io.BytesIO(content)).load(),
        "torchvision: decode, resize": torchvision_way,
    }  # fmt: skip
    found = {}
    for name, way in ways.items():
        for content in contents[:3]:
            way(content, limits)
        start = time.process_time()
        for content in contents:
            way(content, limits)
        found[name] = len(contents) / (time.process_time() - start)
    return found


def steps(contents: list[bytes], limits: Limits) -> dict[str, float]:
    """Seconds of processor time of each step that follows the bare decode."""
    spent = dict.fromkeys(("bare decode", "resize", "to an array"), 0.0)
    for content in contents:
        start = time.process_time()
        image = Image.open(io.BytesIO(content))
        wanted = limits.fit(*image.size)
        if wanted != image.size:
            image.draft(None, wanted)
        image.load()
        decoded = time.process_time()
        picture: Image.Image = image
        if wanted != image.size:
            picture = image.resize(wanted, Image.Resampling.HAMMING)
        smaller = time.process_time()
        np.stack([np.asarray(band) for band in picture.split()])
        end = time.process_time()
        for name, seconds in zip(spent, (decoded - start, smaller - decoded, end - smaller)):
            spent[name] += seconds
    return spent


def peak_of_a_batch(root: str, batch: int, size: int, longest: int) -> None:
    """In a fresh process: the memory of one batch, and the peak while it is made."""
    from kontrast.data import Feeder, open_data, sources

    sources._free_memory = lambda: 0
    images = open_data(root, size=size or None, longest=longest or None, pack=False, workers=2)
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")
    peak = lambda: 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])  # noqa: E731
    before = peak()
    made = next(Feeder(images, batch).batches(0))
    print(json.dumps({"batch": made.images.nbytes, "shape": list(made.images.shape), "peak": peak() - before}))


def measure_batch(root: Path, batch: int, size: int, longest: int) -> dict:
    command = [sys.executable, __file__, "--peak", str(root), str(batch), str(size), str(longest)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--view", type=int, default=224, help="side of a view; crops cover 20% of a picture or more")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--table", type=Path, help="write the tables to this Markdown file")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak_of_a_batch(options.peak[0], *map(int, options.peak[1:]))
        return
    place = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        make_pictures(place / "pictures", options.images)
        size = math.ceil(options.view / math.sqrt(0.2))
        limits = Limits(size, longest=math.ceil(1.5 * size))
        contents = [path.read_bytes() for path in sorted((place / "pictures").iterdir())]
        found, spent = rates(contents, limits), steps(contents, limits)
        made = measure_batch(place / "pictures", options.batch, size, limits.longest or 0)
    finally:
        shutil.rmtree(place)
    first = found["Pillow, bare draft decode"]
    lines = ["| way | images/s per core | time, in bare draft decodes |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {rate:,.1f} | {first / rate:.2f} |" for name, rate in found.items()]
    lines += ["", "| step | share of the bare decode |", "| --- | ---: |"]
    lines += [f"| {name} | {seconds / spent['bare decode']:.2f} |" for name, seconds in spent.items()]
    padded = options.batch * 3 * LARGEST[0] * LARGEST[1]
    lines += [
        "",
        f"A batch of {options.batch}: {made['shape']}, {made['batch'] / 1e6:,.0f} MB; the process grew by at most "
        f"{made['peak'] / 1e6:,.0f} MB while it and the batches after it were made. Padded to the largest picture it "
        f"would have {padded / 1e9:,.1f} GB.",
    ]
    print("\n".join(lines))
    if options.table:
        command = (
            f"python benchmarks/decoding.py --images {options.images} --batch {options.batch} --view {options.view}"
        )
        head = (
            f"# Pictures of many sizes in one batch\n\nWritten by `{command}` ({time.strftime('%Y-%m-%d')}; rates "
            f"count processor time). {options.images} JPEGs from 100x100 to 6,000x4,000 pixels, reduced to a shorter "
            f"side of {size} and a longer side of at most {limits.longest}."
        )
        options.table.write_text(head + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
