"""The same images from a folder, tars, a local S3 server and Parquet: is the encoder the same, and how fast is reading?

    python benchmarks/data_places.py [--images 1000] [--side 256] [--table results/data-places.md]

It needs all extras and the dependency group integrations: the S3 server is moto's, on this machine. A rate is that of
`data.pack=false` with one decoding process, in a shuffled order; only ratios within a run mean anything. The encoders
are of six steps on 48 small images, and their SHA-256 is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from kontrast.data import Feeder, open_data, sources  # noqa: E402

from support import places  # noqa: E402
from support.made_images import encoded  # noqa: E402

BUCKET = "bucket"
WARM = 5
"""Epochs after the first, of which the median counts."""


def photos(count: int, side: int) -> dict[str, bytes]:
    """JPEGs with the detail of a photo, by name, in two classes."""
    generator = np.random.default_rng(0)
    found = {}
    for number in range(count):
        small = Image.fromarray(generator.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8))
        picture = small.resize((side, side), Image.Resampling.BICUBIC)
        found[f"{'ab'[number * 2 // count]}/{number:04d}.png"] = encoded(picture, "JPEG", quality=88)
    return found


def start_server():
    """Start moto's S3 server with one bucket, and return it with a file system that writes to it."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    files = s3fs.S3FileSystem()
    files.mkdir(BUCKET)
    return server, files


def make_places(home: Path, files, images: dict[str, bytes]) -> dict[str, str]:
    """Write images to every place."""
    folder, shards = places.write_folder(home / "folder", images), places.write_shards(home / "shards", images)
    tables = places.write_parquet(home / "tables", images, rows=100)
    for source in (folder, shards, tables):
        places.upload(files, source, f"{BUCKET}/{home.name}/{source.name}")
    address = f"s3://{BUCKET}/{home.name}"
    return {
        "folder": str(folder), "tars": str(shards), "Parquet": str(tables), "folder on S3": f"{address}/folder",
        "tars on S3": f"{address}/shards", "Parquet on S3": f"{address}/tables",
    }  # fmt: skip


def rate(place: str, epoch: int) -> float:
    """Images a second of one epoch that is decoded as it is read."""
    sources._exceeds_memory = lambda *_: True  # a folder this small would be decoded into memory first
    feeder = Feeder(open_data(place, "all", pack=False, workers=1), 50, seed=0)
    began = time.monotonic()
    count = sum(len(batch.images) for batch in feeder.batches(epoch))
    return count / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--table", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        os.environ["KONTRAST_CACHE"] = str(home / "cache")
        server, files = start_server()
        small = make_places(home / "small", files, places.contents())
        encoders = {name: places.train(place, home / "runs" / name) for name, place in small.items()}
        hashes = {name: hashlib.sha256(encoder).hexdigest() for name, encoder in encoders.items()}
        large = make_places(home / "large", files, photos(chosen.images, chosen.side))
        rates = {name: [rate(place, 0)] for name, place in large.items()}
        for epoch in range(1, 1 + WARM):  # in turns, so that what else the machine does hits every place
            for name, place in large.items():
                rates[name].append(rate(place, epoch))
        server.stop()
    report(chosen, hashes, rates)


def report(chosen: argparse.Namespace, hashes: dict[str, str], rates: dict[str, list[float]]) -> None:
    base = statistics.median(rates["folder"][1:])
    options = f"--images {chosen.images} --side {chosen.side}"
    lines = [
        "# The same images from different places",
        "",
        f"Written by `python benchmarks/data_places.py {options}` ({date.today()}, torch {torch.__version__}, CPU, "
        "seed 0, on a",
        "machine that was busy with other work). The S3 server is moto's, in Python on the same machine: its rate says",
        "nothing about an object store. Rates are of one decoding process with `data.pack=false`, relative to the",
        "folder's median of the later epochs. In the first epoch nothing is in the cache; of the later ones, the "
        "median of",
        f"{WARM} is given with the slowest and the fastest, which tell how much the busy machine changes.",
        "",
        "| place | SHA-256 of the encoder | first epoch | later epochs |",
        "| --- | --- | ---: | ---: |",
    ]
    for name, digest in hashes.items():
        first, *later = (value / base for value in rates[name])
        spread = f"{statistics.median(later):.2f} ({min(later):.2f} to {max(later):.2f})"
        lines.append(f"| {name} | `{digest[:16]}` | {first:.2f} | {spread} |")
    lines += ["", "The encoders are " + ("equal." if len(set(hashes.values())) == 1 else "NOT equal.")]
    text = "\n".join(lines) + "\n"
    print(text)
    if chosen.table:
        chosen.table.write_text(text)


if __name__ == "__main__":
    main()
