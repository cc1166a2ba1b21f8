"""Compare packing and feeding images with torchvision's ImageFolder in DataLoader workers; print ratios.

    python benchmarks/data.py [--images 4000] [--workers N] [--folder DIR] [--quick] [--json FILE]

Without --folder it makes a folder of 32x32 JPEGs. Both sides read the same files and count whole images.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from kontrast.data import Feeder, open_data
from kontrast.data.decode_workers import usable_cores
from kontrast.data.pack import pack


def make_folder(root: Path, count: int) -> None:
    generator = np.random.default_rng(0)
    for c in range(10):
        (root / f"class{c}").mkdir(parents=True)
    for i in range(count):
        small = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        small.resize((32, 32), Image.Resampling.BICUBIC).save(root / f"class{i % 10}" / f"{i:06d}.jpg", quality=90)


def seconds(work: Callable[[], int]) -> tuple[float, int]:
    start = time.perf_counter()
    count = work()
    return time.perf_counter() - start, count


def torchvision_epoch(root: Path, workers: int, batch: int) -> int:
    """Read one epoch as the peers do: decode in worker processes, collate, return uint8 batches."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms.v2 import PILToTensor

    loader = DataLoader(ImageFolder(str(root), PILToTensor()), batch, shuffle=True, num_workers=workers, drop_last=True)
    return sum(len(images) for images, _ in loader)


def make_shards(root: Path, folder: Path, each: int = 1000) -> Path:
    """Write the folder's files to tars in random order, with their classes."""
    root.mkdir()
    files = sorted(folder.glob("*/*.jpg"))
    order = np.random.default_rng(0).permutation(len(files))
    for start in range(0, len(files), each):
        with tarfile.open(root / f"{start // each:05d}.tar", "w") as tar:
            for i in order[start : start + each]:
                for name, content in ((".jpg", files[i].read_bytes()), (".cls", files[i].parent.name.encode())):
                    member = tarfile.TarInfo(f"{i:07d}{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return root


def feed_rate(feeder: Feeder, epochs: int) -> float:
    """Return the images per second that a feeder delivers."""
    took, count = seconds(lambda: sum(len(b.images) for epoch in range(epochs) for b in feeder.batches(epoch)))
    return count / took


def race(root: Path, place: Path, workers: int, batch: int) -> dict[str, float]:
    """Return the images per second of each way to read the folder, and the seconds of each second start."""
    store = place / "store"
    torchvision_epoch(root, 0, batch)  # imports and the file cache are not what is measured
    peer_s, peer = seconds(lambda: torchvision_epoch(root, workers, batch))
    pack_s, packed = seconds(lambda: pack(root, store, workers=workers, test_share=0.0) and len(open_data(store)))
    data = open_data(store)
    found = {"images": packed, "peer": peer / peer_s, "pack": packed / pack_s}
    found |= {f"feed_{resident}": feed_rate(Feeder(data, batch, resident=resident), 5) for resident in ("yes", "no")}
    shards = make_shards(place / "shards", root)
    index_s, _ = seconds(lambda: len(open_data(shards, "all", pack=False, workers=workers)))
    again_s, lazy = seconds(lambda: open_data(shards, "all", pack=False, workers=workers))
    feeder = Feeder(lazy, batch)
    next(feeder.batches(0))  # starts the decoding processes
    found["feed_shards"] = feed_rate(feeder, 1)
    open_data(root)
    return found | {
        "open_store_s": seconds(lambda: len(open_data(store)))[0],
        "open_folder_s": seconds(lambda: len(open_data(root)))[0],
        "index_s": index_s,
        "open_shards_s": again_s,
    }


WORDS = {
    "peer": "torchvision ImageFolder, one epoch",
    "pack": "pack, once",
    "feed_yes": "feed, in memory",
    "feed_no": "feed, prefetched",
    "feed_shards": "feed, shards decoded as needed",
    "open_store_s": "second start, packed store",
    "open_folder_s": "second start, folder",
    "index_s": "first start, shards: index",
    "open_shards_s": "second start, shards",
}


def row(name: str, value: float, peer: float) -> dict[str, object]:
    kind = {"seconds to start": value} if name.endswith("_s") else {"images_per_second": value, "ratio": value / peer}
    return {"way": WORDS[name], **kind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="2,000 images: does it run, not how fast")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary) / "images"
        if options.folder is None:
            make_folder(root, 2000 if options.quick else options.images)
        os.environ["KONTRAST_CACHE"] = str(Path(temporary) / "cache")
        found = race(root, Path(temporary), options.workers, options.batch)
    facts = {"images": int(found.pop("images")), "workers": options.workers, "cores": usable_cores()}
    print(", ".join(f"{value} {name}" for name, value in facts.items()))
    for name, value in found.items():
        rate = f"{value:12,.0f} images/s {value / found['peer']:8.1f}"
        print(f"{WORDS[name]:<36} " + (f"{value:12.2f} s" if name.endswith("_s") else rate))
    if options.json:
        facts |= {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        options.json.write_text(
            json.dumps({**facts, "rows": [row(n, v, found["peer"]) for n, v in found.items()]}, indent=1)
        )


if __name__ == "__main__":
    main()
