"""Race objectives and settings on folders of images, as a user would meet them: each gets the same minutes.

    python benchmarks/folder_race.py NAME=PATH ... [--minutes 5] [--candidates nt-xent dcl ...] [--images N] [--seeds 1]
        [--confirm] [--device auto] [--runs runs/folder-race] [--out results/folder-race.json]
    python benchmarks/folder_race.py --table results/folder-race.md

Each cell is the command `kontrast pretrain FOLDER --minutes M` with the settings of a candidate on top of the `folder`
recipe. The folder has the training images alone, of which the command holds out a fifth of each class, so that the test
images are never used; with --confirm the candidate trains on the whole source and is measured on its test images, which
is for the last number only. A cell that is in --out is not run again; an interrupted one begins anew, because its
minutes would not be those of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL import Image

import kontrast
from kontrast.data import open_data
from kontrast.files import write_atomic
from kontrast.training.checkpoints import versions
from kontrast.training.device import choose_device, describe_device

TEACHER = ["teacher.momentum=0.99", "teacher.schedule=cosine"]
LOCAL_CROPS = ["views.local_count=4", "views.local_scale=[0.08,0.4]", "views.crop_scale=[0.4,1.0]"]
CANDIDATES: dict[str, list[str]] = {
    "folder": [],
    "nt-xent": [],
    "three-views": ["views.count=3"],
    "dcl": ["objective.name=dcl", "objective.temperature=0.1"],
    "cacr-k1": ["objective.name=cacr", "objective.t_plus=1.0", "objective.t_minus=2.0"],
    "cacr-k4": ["objective.name=cacr", "objective.t_plus=1.0", "objective.t_minus=0.9", "views.count=5"],
    "moco-v2": ["objective.name=info-nce", "objective.temperature=0.1", "teacher.momentum=0.99", "bank.size=4096"],
    "moco-v3": [
        "objective.name=info-nce", "objective.temperature=0.2", "objective.loss_scale=2tau",
        "objective.reduction=simclr_tf", "head.name=moco-v3", "predictor.name=moco-v3", *TEACHER,
    ],
    "byol": ["objective.name=alignment", "head.name=byol", "predictor.name=byol", *TEACHER],
    "swav": ["objective.name=swav", "head.name=swav", "prototypes.count=512", "prototypes.frozen_epochs=1"],
    "dino": ["objective.name=dino", "head.name=dino", "prototypes.count=1024", "prototypes.kind=weight-norm", *TEACHER],
    "lejepa": [
        "objective.name=lejepa", "objective.sigreg_weight=0.05", "head.name=expander", "training.optimizer=adamw",
        "training.lr=0.001", "training.lr_scaling=none",
    ],
    "multi-crop": LOCAL_CROPS,
    "batch-64": ["training.batch=64"],
    "temperature-0.1": ["objective.temperature=0.1"],
    "wide": ["encoder.width=512"],
    "resnet-64": ["encoder.name=small-resnet", "encoder.width=64"],
    "resnet-128": ["encoder.name=small-resnet", "encoder.width=128"],
    "resnet-256": ["encoder.name=small-resnet", "encoder.width=256"],
    "strong": [
        "views.crop_scale=[0.2,1.0]", "views.jitter=[0.8,0.8,0.8,0.2]", "views.blur=0.5", "views.blur_sigma=[0.1,1.5]",
        "training.weight_decay=5e-4",
    ],
}  # fmt: skip
"""Settings on top of the `folder` recipe, and `one+other` has the settings of both; `folder` is the default itself."""
NT_XENT = ["objective.name=nt-xent", "objective.temperature=0.2"]
"""What candidates other than `folder` have if they name no objective, whatever the recipe chooses for the device."""
LOCAL_SHARE = 9 / 16
"""The side of a local crop, as a share of the views' side."""


def training_folder(source: str, place: Path, count: int) -> Path:
    """Link or write the training images of a source into class folders, at most `count` of them (0: all)."""
    if (place / "done").is_file():
        return place / "images"
    shutil.rmtree(place, ignore_errors=True)
    images = open_data(source, "train")
    chosen = range(0, len(images), max(1, len(images) // count) if count else 1)
    for number in list(chosen)[: count or None]:
        label = "images" if images.labels is None else images.classes[int(images.labels[number])]
        file = Path(source) / images.place / images.names[number]
        folder = place / "images" / label
        folder.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            link(file, folder / f"{number:07d}{file.suffix}")
        else:
            Image.fromarray(images[number].permute(1, 2, 0).numpy()).save(folder / f"{number:07d}.png")
    (place / "done").touch()
    return place / "images"


def link(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(file, place)


def settings_of(candidate: str, folder: str) -> list[str]:
    """Return the overrides of a candidate; the size of local crops follows the views that the recipe chooses."""
    chosen = [setting for part in candidate.split("+") for setting in CANDIDATES[part]]
    if candidate != "folder" and not any(setting.startswith("objective.") for setting in chosen):
        chosen = [*NT_XENT, *chosen]
    if "views.local_count=4" in chosen:
        from kontrast.data.sources import preview_data
        from kontrast.training.auto_recipe import view_size

        size = view_size(preview_data(folder, "train").side, choose_device("auto").type == "cuda")
        chosen.append(f"views.local_size={round(LOCAL_SHARE * size)}")
    return chosen


def known(candidate: str) -> str:
    """Return the candidate if each of its parts has settings."""
    if unknown := [part for part in candidate.split("+") if part not in CANDIDATES]:
        raise argparse.ArgumentTypeError(f"no candidate {unknown[0]!r}: give {', '.join(CANDIDATES)}, joined by +")
    return candidate


def race(source: str, folder: str, cell: dict[str, Any], run: Path, device: str) -> dict[str, Any]:
    """Run the command for one cell, and return its cell with the accuracies and times."""
    shutil.rmtree(run, ignore_errors=True)
    words = ["pretrain", source if cell["confirmed"] else folder, "--minutes", str(cell["minutes"]), "--out", str(run)]
    words += ["--device", device, *settings_of(cell["candidate"], folder), f"seed={cell['seed']}"]
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "kontrast", *words], capture_output=True, text=True)
    cell = {**cell, "seconds": round(time.monotonic() - begin, 1)}
    if done.returncode:
        return {**cell, "failed": done.stderr.strip().splitlines()[-1:]}
    finished = kontrast.Run(run)
    found = list(kontrast.probe(finished, "knn", device=device, say=lambda line: None))
    found += kontrast.probe(finished, "linear", device=device, say=lambda line: None)
    accuracy = {f"{one.probe}, {one.features}": round(one.accuracy, 4) for one in found}
    return {**cell, "epochs": finished.recipe.training.epochs, "images": finished.info.get("images"), **accuracy}


def table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Return the page of the measured cells: the mean over seeds of each set, budget and candidate."""
    lines = ["# Objectives and settings on folders of images, each with the same minutes", ""]
    lines += [f"Written by `python benchmarks/folder_race.py --table` from cells that it measured. {facts['device']}, "
              f"torch {facts['torch']}, kontrast {facts['kontrast']}, {facts['date']}.", ""]  # fmt: skip
    lines += ["Unless a row says *test*, accuracies are of a fifth of the training images, which was held out.", ""]
    lines += ["| set | measured on | minutes | candidate | seeds | epochs | kNN | linear | kNN, untrained | seconds |"]
    lines += ["| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    groups: dict[tuple[str, bool, float, str], list[dict[str, Any]]] = {}
    for one in rows:
        groups.setdefault((one["set"], one["confirmed"], one["minutes"], one["candidate"]), []).append(one)
    for (name, confirmed, minutes, candidate), cells in sorted(groups.items()):
        good = [cell for cell in cells if "failed" not in cell]
        where = "test" if confirmed else "held out"
        if not good:
            lines.append(f"| {name} | {where} | {minutes:g} | {candidate} | 0 | failed | | | | |")
            continue
        means = [fmean(cell[key] for cell in good) for key in ("knn, trained", "linear, trained", "knn, untrained")]
        epochs, seconds = (fmean(cell[key] for cell in good) for key in ("epochs", "seconds"))
        shown = " | ".join(f"{value:.3f}" for value in means)
        lines.append(
            f"| {name} | {where} | {minutes:g} | {candidate} | {len(good)} | {epochs:.0f} | {shown} | {seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="NAME=PATH", help="folders, or names such as digits=digits")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--candidates", nargs="*", type=known, metavar="NAME[+NAME]", default=list(CANDIDATES))
    parser.add_argument("--images", type=int, default=0, help="at most so many training images; 0: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--confirm", action="store_true", help="measure on the test images")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=Path("runs/folder-race"))
    parser.add_argument("--out", type=Path, default=Path("results/folder-race.json"))
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    facts = json.loads(given.out.read_text()) if given.out.is_file() else {"rows": []}
    measured = {key(row): row for row in facts["rows"]}
    for seed in range(given.seeds):
        for one in given.sets:
            name, _, source = one.partition("=")
            place = given.runs / "sets" / f"{name}-{given.images}"
            folder = str(training_folder(source, place, given.images))
            for candidate in given.candidates:
                cell = {"set": name, "limit": given.images, "confirmed": given.confirm, "minutes": given.minutes}
                cell |= {"candidate": candidate, "seed": seed}
                if key(cell) in measured:
                    continue
                row = race(source, folder, cell, given.runs / "run", given.device)
                print(json.dumps(row), flush=True)
                measured[key(row)] = row
                device = describe_device(choose_device(given.device))
                facts = {"device": device, **versions(), "date": time.strftime("%Y-%m-%d")}
                facts["rows"] = list(measured.values())
                write_atomic(given.out, json.dumps(facts, indent=1) + "\n")
    if given.table:
        write_atomic(given.table, table(list(measured.values()), facts))


def key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("set", "limit", "confirmed", "minutes", "candidate", "seed"))


if __name__ == "__main__":
    main()
