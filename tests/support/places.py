"""The same images in several places: a folder, tars, a store, and the same under an address."""

from __future__ import annotations

import json
from pathlib import Path

from kontrast.training.pretrain import pretrain

from support.made_images import encoded, picture, write_tar

COUNT = 48
TINY = [
    "training.max_steps=6", "training.batch=16", "training.log_every=1", "encoder.name=small-conv", "encoder.width=8",
    "views.size=16", "head.outputs=8", "evaluation.every=0", "data.test_share=0", "checkpoints.every=0.01",
]  # fmt: skip
"""Overrides of a run of a fraction of a second. Without a test share, since it is decided by the images' names."""


def contents(count: int = COUNT) -> dict[str, bytes]:
    """Encoded images by their names: two classes, in the order in which every place lists them."""
    return {f"{'ab'[i * 2 // count]}/{i:04d}.png": encoded(picture(i), "PNG") for i in range(count)}


def write_folder(place: Path, images: dict[str, bytes] | None = None) -> Path:
    for name, content in (images or contents()).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


def write_shards(place: Path, images: dict[str, bytes] | None = None, shards: int = 3) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    found = list((images or contents()).items())
    each = -(-len(found) // shards)
    for number in range(shards):
        members = []
        for name, content in found[number * each : (number + 1) * each]:
            label, _, base = name.partition("/")
            members += [(base, content), (base.replace(".png", ".cls"), label.encode())]
        write_tar(place / f"train-{number:03d}.tar", members)
    return place


def write_parquet(place: Path, images: dict[str, bytes] | None = None, files: int = 2, rows: int = 10) -> Path:
    """Parquet files as Hugging Face writes them, with structs {bytes, path} and class names."""
    import pyarrow
    import pyarrow.parquet

    place.mkdir(parents=True, exist_ok=True)
    found = list((images or contents()).items())
    each = -(-len(found) // files)
    features = {"image": {"_type": "Image"}, "label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    for number in range(files):
        some = found[number * each : (number + 1) * each]
        columns = {
            "image": [{"bytes": content, "path": name} for name, content in some],
            "label": ["ab".index(name[0]) for name, _ in some],
            "caption": [f"picture {name}" for name, _ in some],
        }
        table = pyarrow.table(columns).replace_schema_metadata(about)
        pyarrow.parquet.write_table(table, place / f"{number:03d}.parquet", row_group_size=rows)
    return place


def upload(files, source: Path, target: str) -> None:
    """Copy a folder into one of fsspec's file systems."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            files.pipe(f"{target}/{path.relative_to(source).as_posix()}", path.read_bytes())


def train(data, out: Path, *overrides: str) -> bytes:
    """The encoder of a tiny run."""
    run = pretrain(data, overrides=[*TINY, *overrides], out=out, device="cpu", say=lambda line: None)
    return (run / "encoder.safetensors").read_bytes()
