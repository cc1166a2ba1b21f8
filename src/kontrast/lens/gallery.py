"""The pictures of a report: a 2-D map of test images and the nearest neighbours of a few of them.

Writes two files into a run folder: `gallery.png`, one sprite of square tiles in row-major order, and `gallery.json`,
which says what stands on each tile. Both are written beside their place and renamed into it; the JSON carries the
sprite's SHA-256, so that a reader can tell a pair that belongs together.

Shapes: N test images, T train images, F features, Q queries, R neighbours of each.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kontrast.files import write_atomic
from kontrast.lens.map_2d import FEWEST, LIMIT, embed_2d
from kontrast.lens.measures import directions

TILE = 32
COLUMNS = 40


class Tiles:
    """Pictures collected once each, in the order in which they are first asked for."""

    def __init__(self) -> None:
        self.pictures: list[Tensor] = []
        self._places: dict[tuple[str, int], int] = {}

    def place(self, source: str, images: Any, index: int) -> int:
        """The tile that shows picture `index` of `images`; `source` tells train and test apart."""
        if (source, index) not in self._places:
            self._places[source, index] = len(self.pictures)
            self.pictures.append(thumbnail(images[index]))
        return self._places[source, index]

    def sprite(self) -> bytes:
        """All tiles as one PNG, `COLUMNS` wide."""
        from PIL import Image

        rows = max(1, -(-len(self.pictures) // COLUMNS))
        canvas = torch.zeros(3, rows * TILE, COLUMNS * TILE, dtype=torch.uint8)
        for place, picture in enumerate(self.pictures):
            top, left = place // COLUMNS * TILE, place % COLUMNS * TILE
            canvas[:, top : top + TILE, left : left + TILE] = picture
        buffer = io.BytesIO()
        Image.fromarray(canvas.permute(1, 2, 0).contiguous().numpy()).save(buffer, "PNG")
        return buffer.getvalue()


@dataclass
class Pictures:
    """One part of the data, as the gallery shows it."""

    source: str
    features: Any
    images: Any
    labels: Tensor | None
    names: Sequence[str] | None

    def __post_init__(self) -> None:
        """Every given column has one entry an image, else the neighbours would be shown under wrong names."""
        counts = {name: len(column) for name, column in vars(self).items() if name != "source" and column is not None}
        if len(set(counts.values())) > 1:
            raise ValueError(f"the gallery needs one entry an image in each {self.source} column, given {counts}")

    def entry(self, tiles: Tiles, index: int) -> dict[str, Any]:
        """Tile, label and name of one picture; a negative label is none."""
        label = -1 if self.labels is None else int(self.labels[index])
        return {
            "tile": tiles.place(self.source, self.images, index),
            "label": None if label < 0 else label,
            "name": f"{self.source} image {index}" if self.names is None else str(self.names[index]),
        }


def thumbnail(image: Any) -> Tensor:
    """One picture uint8 [C,H,W] as a tile [3,TILE,TILE]: grey becomes colour, the sides keep their ratio."""
    picture = torch.as_tensor(image)
    picture = picture[:3] if picture.shape[0] >= 3 else picture[:1].expand(3, -1, -1)
    height, width = picture.shape[1:]
    if (height, width) != (TILE, TILE):
        scale = TILE / max(height, width)
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        smooth = torch.nn.functional.interpolate(
            picture[None].float(), size=size, mode="bilinear", align_corners=False, antialias=True
        )
        picture = smooth[0].round().clamp(0, 255).to(torch.uint8)
    tile = torch.zeros(3, TILE, TILE, dtype=torch.uint8)
    top, left = (TILE - picture.shape[1]) // 2, (TILE - picture.shape[2]) // 2
    tile[:, top : top + picture.shape[1], left : left + picture.shape[2]] = picture
    return tile


def on_the_cpu(features: Any) -> Tensor:
    return torch.as_tensor(features).detach().to("cpu", torch.float32)


def choose_queries(labels: Tensor | None, among: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Indices drawn at random, one class after the other where there are labels; never by how well they did."""
    shuffled = among[torch.randperm(len(among), generator=generator)].tolist()
    if labels is None:
        return shuffled[:count]
    turns: dict[int, int] = {}
    order = []
    for index in shuffled:
        label = int(labels[index])
        turns[label] = turns.get(label, -1) + 1
        order.append((turns[label], label, index))
    chosen = sorted(order)
    if len(turns) > count:  # more classes than queries: which classes are shown is drawn too
        chosen = [entry for entry in order if entry[0] == 0]
    return [index for _, _, index in chosen[:count]]


def nearest(queries: Tensor, candidates: Tensor, count: int, exclude: list[int] | None) -> tuple[Tensor, Tensor]:
    """Cosines and indices [Q,R] of the nearest candidates; `exclude` names each query's own place among them."""
    cosines = queries @ candidates.T
    if exclude is not None:
        cosines[torch.arange(len(exclude)), torch.tensor(exclude, dtype=torch.long)] = -torch.inf
    kept = max(0, min(count, len(candidates) - (exclude is not None)))
    best, places = cosines.topk(kept, dim=1)
    return best, places


def write_gallery(
    folder: Path,
    features: Tensor,
    images: Any,
    labels: Tensor | None,
    classes: Sequence[str] | None,
    names: Sequence[str],
    *,
    train_features: Tensor | None = None,
    train_images: Any = None,
    train_labels: Tensor | None = None,
    train_names: Sequence[str] | None = None,
    points: int = 1000,
    queries: int = 12,
    neighbours: int = 8,
    seed: int = 0,
) -> Path:
    """Write gallery.json and gallery.png for features [N,F] of images uint8 [N,C,H,W]; returns the JSON's path.

    Neighbours are sought by cosine among the train images where features and images of those are given, else among the
    other test images.
    """
    test = Pictures("test", features, images, labels, names)
    train = Pictures("train", train_features, train_images, train_labels, train_names)
    generator = torch.Generator().manual_seed(seed)
    unit, tiles = directions(on_the_cpu(features)), Tiles()
    sample = torch.randperm(len(unit), generator=generator)[: min(points, LIMIT)].sort().values
    chosen = choose_queries(labels, sample, queries, generator)
    mapped = _mapped(tiles, test, sample, unit, seed)
    pool, cosines, near = _sought(chosen, unit, neighbours, test, train)
    record = {
        "version": 1,
        **_counted(classes, labels, train_labels),
        "method": "t-SNE" if len(sample) >= FEWEST else "PCA",
        "neighbours_from": pool.source,
        "points": mapped,
        "queries": _asked(tiles, test, chosen, pool, cosines, near),
    }
    return _write(Path(folder), record, tiles)


def _counted(classes: Sequence[str] | None, *labels: Tensor | None) -> dict[str, Any]:
    """The classes' names, and how many of them have an image."""
    present = {n for part in labels if part is not None for n in part.tolist() if n >= 0}
    return {"classes": None if classes is None else [str(name) for name in classes], "classes_present": len(present)}


def _write(folder: Path, record: dict[str, Any], tiles: Tiles) -> Path:
    """The sprite, then the record that knows it: a reader between the two sees that they don't belong together."""
    sprite = tiles.sprite()
    record |= {"tile": TILE, "columns": COLUMNS, "count": len(tiles.pictures)}
    record["sprite_sha256"] = hashlib.sha256(sprite).hexdigest()
    replace(folder / "gallery.png", sprite)
    # ASCII, so that file names with bytes that are no UTF-8 (surrogates) come back exactly.
    return replace(folder / "gallery.json", json.dumps(record, allow_nan=False).encode("ascii"))


def _mapped(tiles: Tiles, test: Pictures, sample: Tensor, unit: Tensor, seed: int) -> list[dict[str, Any]]:
    places = zip(sample.tolist(), embed_2d(unit[sample], seed=seed).tolist())
    return [{"x": round(x, 3), "y": round(y, 3), **test.entry(tiles, index)} for index, (x, y) in places]


def _sought(
    chosen: list[int], unit: Tensor, count: int, test: Pictures, train: Pictures
) -> tuple[Pictures, Tensor, Tensor]:
    """Where neighbours were sought, and those found there; of the test images, never the query itself."""
    if train.features is None or train.images is None:
        return test, *nearest(unit[chosen], unit, count, chosen)
    return train, *nearest(unit[chosen], directions(on_the_cpu(train.features)), count, None)


def _asked(
    tiles: Tiles, test: Pictures, chosen: list[int], pool: Pictures, cosines: Tensor, near: Tensor
) -> list[dict[str, Any]]:
    asked = []
    for query, row, indices in zip(chosen, cosines.tolist(), near.tolist()):
        answers = [{**pool.entry(tiles, i), "similarity": round(cosine, 4)} for cosine, i in zip(row, indices)]
        asked.append({**test.entry(tiles, query), "neighbours": answers})
    return asked


def replace(path: Path, content: bytes) -> Path:
    """Write a file atomically and return its path."""
    write_atomic(path, content)
    return path
