"""Compare training that continues from an earlier run with training from random weights, on a new set of images.

    python benchmarks/starting_weights.py --root DATA [--epochs 30] [--seeds 3] [--shares 1 0.5 0.3 0.1] [--out FILE]

The earlier run is the quick start, on the embedded digits. The new set is a part of MNIST (DATA/mnist), as PNG files in
class folders. Each row is one way to train on it: from random weights for all epochs and for a tenth of them, and from
the earlier run for a tenth, with the learning rate as several shares of the recipe's. Accuracies are of the test
images, by kNN and by a linear probe, as mean over the seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from PIL import Image

import kontrast
from kontrast.data import open_data
from kontrast.training.checkpoints import versions
from kontrast.training.device import choose_device, describe_device

KINDS = ("trained", "starting weights", "untrained", "pixels")


def write_images(folder: Path, root: str, counts: dict[str, int]) -> Path:
    """Write the first images of each split of MNIST as PNG files in class folders."""
    for split, count in counts.items():
        images = open_data("mnist", split, root=root).first(count)
        for number, (pixels, label) in enumerate(zip(images.images, images.labels.tolist())):
            place = folder / split / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[0].numpy()).save(place / f"{number:05d}.png")
    return folder


def accuracies(run: kontrast.Run, device: str) -> dict[str, dict[str, float]]:
    """Return the accuracy of each probe by the kind of features."""
    found: dict[str, dict[str, float]] = {}
    for result in kontrast.probe(run, device=device, say=lambda line: None):
        found.setdefault(result.probe, {})[result.features] = result.accuracy
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="the folder that contains mnist/")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--source-epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="*", default=[1, 0.5, 0.3, 0.1])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    tenth = max(1, given.epochs // 10)
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        photos = write_images(home / "mnist", given.root, {"train": given.images, "test": 1000})
        common: dict[str, Any] = {"device": given.device, "say": lambda line: None}
        source = kontrast.pretrain("digits", out=home / "source", training={"epochs": given.source_epochs}, **common)
        same = {"encoder": {"name": "small-conv", "width": 128}, "views": {"size": 32}}
        rate = kontrast.Run(source).recipe.training.lr
        ways: dict[str, dict[str, Any]] = {
            f"random weights, {given.epochs} epochs": {**same, "epochs": given.epochs},
            f"random weights, {tenth} epochs": {**same, "epochs": tenth},
            f"--from, {tenth} epochs, default rate": {"from_": source, "epochs": tenth},
        }
        for share in given.shares:
            ways[f"--from, {tenth} epochs, rate x {share:g}"] = {"from_": source, "epochs": tenth, "share": share}
        rows = []
        for way, settings in ways.items():
            begin, seen = time.monotonic(), []
            for seed in range(given.seeds):
                options = {key: settings[key] for key in ("encoder", "views", "from_") if key in settings}
                training: dict[str, Any] = {"epochs": settings["epochs"]}
                if "share" in settings:
                    training["lr"] = settings["share"] * FOLDER_RATE
                name = f"{way.replace(' ', '-').replace(',', '')}-{seed}"
                run = kontrast.pretrain(
                    photos, out=home / name, training=training, seed=seed, evaluation={"every": 0}, **options, **common
                )
                seen.append(accuracies(run, given.device))
            row: dict[str, Any] = {"way": way, "seconds": (time.monotonic() - begin) / given.seeds}
            for probe in ("knn", "linear"):
                for kind in KINDS:
                    values = [one[probe][kind] for one in seen if kind in one[probe]]
                    if values:
                        spread = stdev(values) if len(values) > 1 else 0.0
                        row[f"{probe}, {kind}"] = [round(fmean(values), 4), round(spread, 4)]
            rows.append(row)
            print(json.dumps(row), flush=True)
    device = describe_device(choose_device(given.device))
    arguments = {k: str(v) for k, v in vars(given).items() if k not in ("root", "out")}  # not where they lie
    facts = {"arguments": arguments, "device": device, **versions()}
    facts |= {"threads": torch.get_num_threads(), "source rate": rate, "rows": rows}
    if given.out:
        given.out.write_text(json.dumps(facts, indent=1) + "\n")


FOLDER_RATE = 0.3  # of the folder recipe, for random weights

if __name__ == "__main__":
    main()
