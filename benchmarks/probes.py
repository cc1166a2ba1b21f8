"""Time each linear protocol on a run's features, cached and with fresh crops; print a table and JSON.

    python benchmarks/probes.py [RUN] [--protocols cacr moco ...] [--cached] [--device auto] [--json FILE]

Without RUN, two epochs of the quick start are trained first. The goal is less than two minutes per protocol on a run of
CIFAR-10. The time of fresh crops includes making the features; the accuracy is that of the last epoch. kNN and the
logistic probe are timed on the same features.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kontrast.probes import PROTOCOLS, extract_features, knn, linear, logistic
from kontrast.runs.cropped_features import CROPS, CroppedFeatures
from kontrast.runs.run import Run
from kontrast.training.device import choose_device
from kontrast.training.pretrain import pretrain

LIMIT = 120.0


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(name: str, device: torch.device, work: Any) -> dict[str, Any]:
    start = clock(device)
    result = work()
    seconds = clock(device) - start
    return {"probe": name, "seconds": round(seconds, 3), "accuracy": result.accuracy, "within": seconds < LIMIT}


def race(run: Run, names: list[str], device: torch.device, cached_only: bool) -> dict[str, Any]:
    train, test = run.data("train"), run.data("test")
    encoder = run.encoder(device).to(memory_format=torch.channels_last)
    start = clock(device)
    train_features, test_features = (
        extract_features(encoder, part, run.transform(), device=device).to(device) for part in (train, test)
    )
    features = clock(device) - start
    sets = (train_features, train.labels.to(device), test_features, test.labels.to(device))
    rows = [timed("knn", device, lambda: knn(*sets)), timed("logistic", device, lambda: logistic(*sets))]
    for name in names:
        rows.append(timed(f"{name}, cached", device, lambda name=name: linear(*sets, name)))
        if not cached_only:
            rows.append(
                timed(f"{name}, crops", device, lambda name=name: on_crops(run, encoder, train, sets, name, device))
            )
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    facts = {
        "run": run.path.name,
        "train": len(train),
        "test": len(test),
        "width": train_features.shape[1],
        "device": machine,
    }
    return {**facts, "torch": torch.__version__, "features_seconds": round(features, 3), "rows": rows}


def on_crops(run: Run, encoder: Any, train: Any, sets: Any, name: str, device: torch.device) -> Any:
    return linear(*sets, name, features_of_epoch=CroppedFeatures(run, encoder, train, CROPS[name], device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--protocols", nargs="+", choices=list(PROTOCOLS), default=list(PROTOCOLS))
    parser.add_argument("--cached", action="store_true", help="leave the fresh crops out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = Run(options.run or pretrain(overrides=["training.epochs=2"], out=Path(place) / "quickstart"))
        found = race(run, options.protocols, choose_device(options.device), options.cached)
    print(f"{found['train']:,} train and {found['test']:,} test images, width {found['width']}, {found['device']}")
    print(f"{'probe':<20}{'seconds':>10}{'accuracy':>10}")
    print(f"{'features, once':<20}{found['features_seconds']:>10.2f}")
    for row in found["rows"]:
        late = "" if row["within"] else f"  over {LIMIT:g} s"
        print(f"{row['probe']:<20}{row['seconds']:>10.2f}{row['accuracy']:>10.4f}{late}")
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
