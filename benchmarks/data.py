"""Reading images: packing and feeding beside torchvision's ImageFolder in DataLoader workers. Prints ratios.

    python benchmarks/data.py [--images 4000] [--workers N] [--folder DIR]

Without --folder it makes a folder of 32x32 JPEGs. Both sides read the same files and count whole images.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from kontrast.data import Feeder, open_data, pack
from kontrast.data.workers import usable_cores


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
    """One pass of the peers' way: decode in worker processes, collate, deliver uint8 batches."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms.v2 import PILToTensor

    loader = DataLoader(ImageFolder(str(root), PILToTensor()), batch, shuffle=True, num_workers=workers, drop_last=True)
    return sum(len(images) for images, _ in loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary) / "images"
        if options.folder is None:
            make_folder(root, options.images)
        os.environ["KONTRAST_CACHE"] = str(Path(temporary) / "cache")
        store = Path(temporary) / "store"
        torchvision_epoch(root, 0, options.batch)  # imports and the file cache are not what is measured
        peer_s, peer = seconds(lambda: torchvision_epoch(root, options.workers, options.batch))
        pack_s, packed = seconds(
            lambda: pack(root, store, workers=options.workers, test_share=0.0) and len(open_data(store))
        )
        open_s, _ = seconds(lambda: len(open_data(store)))
        data = open_data(store)
        rates = {}
        for resident in ("yes", "no"):
            feeder = Feeder(data, options.batch, resident=resident)
            took, fed = seconds(lambda f=feeder: sum(len(b.images) for e in range(5) for b in f.batches(e)))
            rates[resident] = fed / took
        peer_rate = peer / peer_s
        print(f"{packed} images, {options.workers} workers, {usable_cores()} cores")
        print(f"torchvision ImageFolder, one epoch   {peer_rate:12,.0f} images/s      1.0")
        print(
            f"pack, once                           {packed / pack_s:12,.0f} images/s {packed / pack_s / peer_rate:8.1f}"
        )
        print(f"feed, in memory                      {rates['yes']:12,.0f} images/s {rates['yes'] / peer_rate:8.1f}")
        print(f"feed, prefetched                     {rates['no']:12,.0f} images/s {rates['no'] / peer_rate:8.1f}")
        print(f"second start                         {open_s:12.2f} s")
        print(
            json.dumps(
                {
                    "peer": peer_rate,
                    "pack": packed / pack_s,
                    **{f"feed_{k}": v for k, v in rates.items()},
                    "open_s": open_s,
                }
            )
        )


if __name__ == "__main__":
    main()
