"""Train short runs of many recipes and print the SHA-256 of each encoder, to show that a change kept the same bits.

    python benchmarks/same_bits.py OUT [--cifar10 FOLDER] [--mnist ROOT]    # train, and write OUT/hashes.json
    python benchmarks/same_bits.py --compare OLD/hashes.json NEW/hashes.json

Every run is on the CPU with two threads. Bits are comparable only between runs of one version of torch on one kind of
processor. The image folders are made from the embedded digits, so most cases need no data; those that read CIFAR-10 or
MNIST are skipped unless their folder is given.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

SHORT = ["training.max_steps=20", "evaluation.every=0"]


def small(recipe: str, *overrides: str) -> list[str]:
    """A recipe of CIFAR-10 on the digits, with a small encoder."""
    return ["digits", "--recipe", recipe, "training.batch=16", "views.size=32", *SHORT, *overrides]


CASES: dict[str, list[str]] = {
    "quick-start": [],
    "byol (teacher, predictor)": ["--recipe", "digits/byol", *SHORT],
    "moco-v2 (teacher, bank, split batch norm)": ["--recipe", "digits/moco-v2", *SHORT],
    "simsiam (predictor, stop-gradient)": ["--recipe", "digits/simsiam", *SHORT],
    "cacr-k4 (five views)": ["--recipe", "digits/cacr-k4", *SHORT],
    "random bits": ["--recipe", "digits/randbit", *SHORT],
    "dcl, accumulation": ["--recipe", "digits/dcl", *SHORT, "training.accumulate=4"],
    "moco-v2, accumulation": ["--recipe", "digits/moco-v2", *SHORT, "training.accumulate=2"],
    "imbalance": ["--recipe", "quickstart", *SHORT, "data.imbalance=exponential"],
    "bank without teacher": ["--recipe", "quickstart", *SHORT, "bank.size=512"],
    "lars, warm-up": [
        "--recipe", "quickstart", *SHORT, "training.optimizer=lars", "training.lr_inside=true", "training.epochs=3",
    ],
    "adamw, steps": [
        "--recipe", "quickstart", *SHORT, "training.optimizer=adamw", "training.lr=0.001", "training.schedule=steps",
        "training.milestones=[1,2]",
    ],
    "multi-crop": small("cifar10/sim-affinity-multi-crop"),
    "jcl (bank of means)": small("cifar10/jcl"),
    "cacr-moco": small("cifar10/cacr-moco"),
    "hard negatives": small("cifar10/hn-cl"),
    "align-uniform": small("cifar10/au-cl"),
    "sim-whitening": small("cifar10/sim-whitening"),
    "sim-trace": small("cifar10/sim-trace"),
    "w-mse": small("cifar10/w-mse"),
    "barlow-twins": small("cifar10/barlow-twins"),
    "vicreg": small("cifar10/vicreg"),
    "swd": small("cifar10/gcl-swd-hypersphere"),
    "dclw": small("cifar10/dclw"),
    "decoupled nt-xent": small("cifar10/gcl-decoupled"),
    "resnet-18": small("cifar10/simclr", "training.max_steps=4"),
    "folder (auto recipe)": ["{folder}", "training.max_steps=20"],
    "folder, unpacked": ["{folder}", "training.max_steps=20", "data.pack=false"],
    "shards": ["{shards}", "training.max_steps=20"],
    "shards, unpacked": ["{shards}", "training.max_steps=20", "data.pack=false"],
    "cifar10 (imbalance)": ["{cifar10}", "--recipe", "cifar10/cl-exponential", *SHORT, "training.batch=32"],
    "mnist (random bits)": ["--recipe", "mnist/randbit", *SHORT, "training.batch=64", "data.root={mnist}"],
}  # fmt: skip


def make_folder(place: Path) -> tuple[Path, Path]:
    """120 PNGs of digits in four class folders, and the same pictures as two shards."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    scans = load_digits()
    folder, shards = place / "pictures", place / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    members: list[list[tuple[str, bytes]]] = [[], []]
    for number in range(120):
        label = number % 4
        scan = scans.images[scans.target == label][number // 4]
        pixels = np.kron((scan * 15).astype(np.uint8), np.ones((6, 6), np.uint8))
        data = io.BytesIO()
        Image.fromarray(pixels).convert("RGB").save(data, "PNG")
        path = folder / f"class{label}" / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.getvalue())
        members[number % 2] += [(f"{number:03}.png", data.getvalue()), (f"{number:03}.cls", str(label).encode())]
    for number, part in enumerate(members):
        with tarfile.open(shards / f"part-{number}.tar", "w") as tar:
            for name, body in part:
                member = tarfile.TarInfo(name)
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))
    return folder, shards


def train_all(out: Path, roots: dict[str, str], only: str) -> dict[str, str]:
    folder, shards = make_folder(out / "data")
    names = {"folder": str(folder), "shards": str(shards), **roots}
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "KONTRAST_CACHE": str(out / "cache")}
    hashes = {}
    for case, arguments in CASES.items():
        if only not in case:
            continue
        if any("{" + name + "}" in argument for argument in arguments for name, at in names.items() if not at):
            continue
        run = out / "runs" / "".join(c if c.isalnum() else "-" for c in case)
        filled = [a.format(**names) if a.startswith(("{", "data.root={")) else a for a in arguments]
        probes = [] if case == "quick-start" else ["--no-probes"]
        command = [sys.executable, "-m", "kontrast", "pretrain", *filled, "--device", "cpu", *probes, "--out", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            hashes[case] = f"failed with exit code {done.returncode}: {done.stderr.strip()[-300:]}"
        else:
            hashes[case] = hashlib.sha256((run / "encoder.safetensors").read_bytes()).hexdigest()
        print(f"{case:<45} {hashes[case]}", flush=True)
    return hashes


def compare(old: Path, new: Path) -> int:
    before, after = (json.loads(path.read_text()) for path in (old, new))
    different = [case for case in before | after if before.get(case) != after.get(case)]
    for case in before | after:
        print(f"{'DIFFERENT' if case in different else 'equal':<10} {case:<45} {str(before.get(case))[:16]}")
    print(f"{len(before | after) - len(different)} of {len(before | after)} encoders have the same bits")
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--cifar10", default="", help="CIFAR-10 as a folder of pictures, train/CLASS/*.jpg.")
    parser.add_argument("--mnist", default="", help="The folder that holds MNIST.")
    parser.add_argument("--only", default="", help="Train the cases whose name contains this.")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    asked = parser.parse_args()
    if asked.compare:
        return compare(*asked.compare)
    out = asked.out.resolve()
    hashes = train_all(out, {"cifar10": asked.cifar10, "mnist": asked.mnist}, asked.only)
    (out / "hashes.json").write_text(json.dumps(hashes, indent=1))
    return 1 if any(value.startswith("failed") for value in hashes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
