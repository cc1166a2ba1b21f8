"""Make run folders like those of training, with invented measurements and real pictures of digits."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import torch

CLASSES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
RECIPE = """title = "NT-Xent on the embedded digits"
seed = 0

[objective]
name = "{objective}"
temperature = {temperature}

[views]
policy = "simclr-cifar"
count = 2
size = 32

[encoder]
name = "resnet-small"

[data]
source = "digits"

[training]
epochs = {epochs}
batch = 256
lr = 0.06
"""


def digit_pictures() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features, colored pictures uint8 [N,3,32,32] and labels of scikit-learn's digit scans."""
    from sklearn.datasets import load_digits
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    scans = load_digits()
    features = LinearDiscriminantAnalysis().fit(scans.data[:600], scans.target[:600]).transform(scans.data)
    random = np.random.default_rng(0)
    ink, paper = random.uniform(0.55, 1, (2, len(features), 3, 1, 1))
    gray = torch.tensor(scans.images / 16).float()[:, None]
    gray = torch.nn.functional.interpolate(gray, size=(32, 32), mode="bilinear").numpy()
    pictures = 255 * (gray * ink + (1 - gray) * paper * 0.4)
    return torch.tensor(features).float(), torch.tensor(pictures).to(torch.uint8), torch.tensor(scans.target)


def write_run(
    folder: Path,
    *,
    epochs: int = 10,
    labelled: bool = True,
    objective: str = "nt-xent",
    end: float = 0.863,
    seed: int = 0,
    pictures: Path | None = None,
) -> Path:
    """Write a finished run; `pictures` is a run whose gallery is copied instead of made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(RECIPE.format(objective=objective, temperature=0.2, epochs=epochs))
    random = np.random.default_rng(seed)
    lines, speed, per_epoch = [], [], 4
    for step in range(1, epochs * per_epoch + 1):
        epoch, part = step / per_epoch, step / (epochs * per_epoch)
        pull = -3.2 - 1.5 * (1 - math.exp(-5 * part)) + random.normal(0, 0.02)
        push = 8.9 + 0.4 * math.exp(-6 * part) + random.normal(0, 0.02)
        lr = 0.06 * min(1, epoch) * (1 + math.cos(math.pi * part)) / 2
        lines.append(
            {"step": step, "epoch": epoch, "loss": pull + push, "attraction": pull, "repulsion": push, "lr": lr}
        )
        speed.append({"step": step, "epoch": epoch, "images_per_second": 1850 + random.normal(0, 40)})
        if labelled and step % per_epoch == 0:
            lines.append({"step": step, "epoch": epoch, "knn": 0.42 + (end - 0.42) * (1 - math.exp(-4 * part))})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "speed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in speed))
    information = {
        "version": 1,
        "command": "kontrast pretrain --recipe digits/nt-xent",
        "device": "cpu, 2 threads",
        "kontrast": "0.2.0",
        "torch": "2.11.0",
        "python": "3.12.3",
        "data": {"name": "digits", "images": 4000, "classes": 10},
        "started": "2025-01-31T10:00:00+00:00",
        "finished": "2025-01-31T10:01:43+00:00",
        "seconds": 103.2,
        "data_place": {"source": "photos", "place": "/home/someone/photos"},
        "first_checkpoint": 24,
    }
    (folder / "run.json").write_text(json.dumps(information))
    probes = []
    for probe, values in {"knn": (end, 0.418, 0.496), "linear": (end + 0.021, 0.552, 0.604)}.items():
        for features, accuracy in zip(("trained", "untrained", "pixels"), values):
            wide = 1.96 * math.sqrt(accuracy * (1 - accuracy) / 1000)
            entry = {"probe": probe, "features": features, "accuracy": accuracy, "n": 1000, "seed": 0}
            entry |= {"low": accuracy - wide, "high": accuracy + wide}
            probes.append(entry | {"protocol": {"k": 20, "temperature": 0.1} if probe == "knn" else {"epochs": 100}})
    if labelled:
        (folder / "probes.json").write_text(json.dumps({"version": 1, "probes": probes}))
    if pictures is None:
        write_pictures(folder, seed)
    else:
        shutil.copy(pictures / "gallery.png", folder)
        shutil.copy(pictures / "gallery.json", folder)
    if not labelled:
        forget_labels(folder / "gallery.json")
    return folder


def write_pictures(folder: Path, seed: int) -> None:
    from kontrast.data import ImageSet
    from kontrast.lens.gallery import GallerySplit, write_gallery

    features, pictures, labels = digit_pictures()
    features = features[600:] + 0.5 * torch.randn(1197, 9, generator=torch.Generator().manual_seed(seed))
    names = [f"test/{int(label)}/{number:05d}.png" for number, label in enumerate(labels[600:])]
    images = ImageSet(pictures[600:], names, labels[600:], classes=CLASSES)
    write_gallery(folder, GallerySplit("test", features, images))


def forget_labels(path: Path) -> None:
    gallery = json.loads(path.read_text())
    gallery["classes"] = None
    for entry in [*gallery["points"], *gallery["queries"], *(n for q in gallery["queries"] for n in q["neighbours"])]:
        entry["label"] = None
    path.write_text(json.dumps(gallery))
