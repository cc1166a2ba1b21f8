"""Detect blood cells with an encoder pre-trained on the same pictures without labels, on other pictures, and at random.

    git clone https://github.com/Shenggan/BCCD_Dataset carried/bccd
    python benchmarks/bccd.py carried/bccd/BCCD [--other DATA] [--labels 0.1] [--seeds 3] [--jobs 9] [--small]
        [--out runs/bccd]

It pre-trains two ResNet-18 by the `folder` recipe, one on the training pictures of BCCD and one on other pictures, and
then trains Faster R-CNN with FPN by one schedule on each of them and on random weights. With --small, encoders,
pictures and heads are small enough for a CPU. Repeated after a kill, it continues.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import kontrast
from kontrast.data import open_data
from kontrast.data.annotated import open_annotated

ENCODER = {"name": "resnet-18", "stem": "imagenet"}
SCHEDULE = {
    "steps": 600, "batch": 8, "lr": 0.01, "warmup": 60, "short_sides": [320, 352, 384], "test_side": 384, "crop": 0.5,
}  # fmt: skip
VIEW_SIDE = 160
SMALL_ENCODER = {"name": "small-resnet", "width": 128, "depth": 2, "stem": "imagenet"}
SMALL_SCHEDULE = {
    **SCHEDULE, "steps": 300, "lr": 0.02, "warmup": 30, "short_sides": [160, 176, 192], "test_side": 192,
    "channels": 64, "head_width": 256, "proposals": 200, "regions": 128,
}  # fmt: skip
SMALL_VIEW_SIDE = 96


def training_pictures(data: Path, folder: Path) -> Path:
    """Copy the pictures of the training split into a folder, so that no test picture is seen."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in open_annotated(data, "train").names:
        shutil.copy(data / name, folder / Path(name).name)
    return folder


def pretrained(source: str, place: Path, presentations: int, device: str, small: bool) -> Any:
    """Return the run in a folder, which is trained first or finished if need be.

    What is not given here is chosen by the `folder` recipe, as for anybody's pictures.
    """
    options: dict[str, Any] = {"out": place, "device": device}
    if (place / "run.json").is_file() and kontrast.Run(place).info.get("finished"):
        return kontrast.Run(place)
    if (place / "recipe.toml").is_file():
        return kontrast.pretrain(resume=True, **options)
    epochs = max(1, round(presentations / len(open_data(source, "train"))))
    encoder, side = (SMALL_ENCODER, SMALL_VIEW_SIDE) if small else (ENCODER, VIEW_SIDE)
    settings: dict[str, Any] = {"encoder": encoder, "views": {"size": side}, "evaluation": {"every": 0}}
    # Compiling would take longer than it saves.
    settings["training"] = {"epochs": epochs, "warmup": epochs / 10, "compile": "no"}
    return kontrast.pretrain(source, "folder", **options, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--other", default="digits", help="the other pictures: a folder or a named set")
    parser.add_argument("--labels", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="detectors that are trained at once")
    parser.add_argument("--presentations", type=int, default=200_000, help="images that pre-training sees in all")
    parser.add_argument("--small", action="store_true", help="small encoders, pictures and heads, for a CPU")
    parser.add_argument("--steps", type=int, help="steps of each detector; default: those of the schedule")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/bccd"))
    given = parser.parse_args()
    pictures = training_pictures(given.data, given.out / "pictures")
    own = pretrained(str(pictures), given.out / "own", given.presentations, given.device, given.small)
    other = pretrained(given.other, given.out / "other", given.presentations, given.device, given.small)
    schedule = SMALL_SCHEDULE if given.small else SCHEDULE
    results = kontrast.transfer(
        own, given.data, "boxes", labels=given.labels, seeds=given.seeds, against=[other],
        jobs=given.jobs, device=given.device,
        overrides={**schedule, "steps": given.steps or schedule["steps"]},
    )  # fmt: skip
    print(results)
    print(kontrast.report(own))


if __name__ == "__main__":
    main()
