"""The pictures of a report: a 2-D map of test images, and the nearest neighbors of a few of them.

Writes two files into a run folder: `gallery.png`, one sprite of square tiles in row-major order, and `gallery.json`,
which describes each tile. The JSON holds the sprite's SHA-256, so that a reader can tell if the two belong together.

Shapes: N test images, T train images, F features, Q queries, R neighbors of each.
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
from kontrast.lens.map_2d import FEWEST, LIMIT, map_to_plane
from kontrast.lens.measures import directions

TILE = 32
COLUMNS = 40


class Tiles:
    """The thumbnails of a gallery, each image once, in the order of first use."""

    def __init__(self) -> None:
        self.pictures: list[Tensor] = []
        self._numbers: dict[tuple[str, int], int] = {}

    def add(self, source: str, images: Any, index: int) -> int:
        """Return the number of the tile that shows image `index` of the split `source`."""
        if (source, index) not in self._numbers:
            self._numbers[source, index] = len(self.pictures)
            self.pictures.append(thumbnail(images[index]))
        return self._numbers[source, index]

    def sprite(self) -> bytes:
        """Return all tiles as one PNG, `COLUMNS` wide."""
        rows = max(1, -(-len(self.pictures) // COLUMNS))
        canvas = torch.zeros(3, rows * TILE, COLUMNS * TILE, dtype=torch.uint8)
        for number, picture in enumerate(self.pictures):
            top, left = number // COLUMNS * TILE, number % COLUMNS * TILE
            canvas[:, top : top + TILE, left : left + TILE] = picture
        return encode_png(canvas)


@dataclass(frozen=True)
class GallerySplit:
    """Features [N,F], images uint8 [N,C,H,W], labels [N] and names of the images of one split, "train" or "test"."""

    source: str
    features: Tensor
    images: Any
    labels: Tensor | None
    names: Sequence[str]

    def __post_init__(self) -> None:
        columns = (self.features, self.images, self.labels, self.names)
        assert len({len(column) for column in columns if column is not None}) == 1, "one entry per image in each column"

    def directions(self) -> Tensor:
        """Return the features as unit vectors, float32 on the CPU."""
        return directions(self.features.detach().to("cpu", torch.float32))

    def entry(self, tiles: Tiles, index: int) -> dict[str, Any]:
        """Return tile, label and name of one image; a negative label means none."""
        label = -1 if self.labels is None else int(self.labels[index])
        return {
            "tile": tiles.add(self.source, self.images, index),
            "label": None if label < 0 else label,
            "name": str(self.names[index]),
        }


def write_gallery(
    folder: Path,
    test: GallerySplit,
    classes: Sequence[str] | None = None,
    *,
    train: GallerySplit | None = None,
    points: int = 1000,
    queries: int = 12,
    neighbors: int = 8,
    seed: int = 0,
) -> Path:
    """Write gallery.json and gallery.png, and return the path of the JSON file.

    Neighbors are searched by cosine among the train images, or among the other test images if there are none.
    """
    generator = torch.Generator().manual_seed(seed)
    unit, tiles = test.directions(), Tiles()
    sample = torch.randperm(len(unit), generator=generator)[: min(points, LIMIT)].sort().values
    chosen = choose_queries(test.labels, sample, queries, generator)
    places = zip(sample.tolist(), map_to_plane(unit[sample], seed=seed).tolist())
    mapped = [{"x": round(x, 3), "y": round(y, 3), **test.entry(tiles, index)} for index, (x, y) in places]
    if train is None:
        pool, (cosines, near) = test, nearest_candidates(unit[chosen], unit, neighbors, exclude=chosen)
    else:
        pool, (cosines, near) = train, nearest_candidates(unit[chosen], train.directions(), neighbors)
    shown = []
    for query, row, indices in zip(chosen, cosines.tolist(), near.tolist()):
        found = [{**pool.entry(tiles, i), "similarity": round(cosine, 4)} for cosine, i in zip(row, indices)]
        shown.append({**test.entry(tiles, query), "neighbours": found})
    labels = [split.labels for split in (test, train) if split is not None and split.labels is not None]
    sprite = tiles.sprite()
    tree = {
        "version": 1,
        "classes": None if classes is None else [str(name) for name in classes],
        "classes_present": len({n for column in labels for n in column.tolist() if n >= 0}),
        "method": "t-SNE" if len(sample) >= FEWEST else "PCA",
        "neighbours_from": pool.source,
        "points": mapped,
        "queries": shown,
        "tile": TILE,
        "columns": COLUMNS,
        "count": len(tiles.pictures),
        "sprite_sha256": hashlib.sha256(sprite).hexdigest(),
    }
    write_atomic(folder / "gallery.png", sprite)
    # ASCII, so that file names with bytes that are not UTF-8 (surrogates) are restored exactly.
    write_atomic(folder / "gallery.json", json.dumps(tree, allow_nan=False).encode("ascii"))
    return folder / "gallery.json"


def encode_png(picture: Tensor, optimize: bool = False) -> bytes:
    """Return a picture uint8 [3,H,W] as a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()).save(buffer, "PNG", optimize=optimize)
    return buffer.getvalue()


def thumbnail(image: Any) -> Tensor:
    """Fit one image uint8 [C,H,W] into a tile [3,TILE,TILE]; gray becomes color, the aspect ratio is kept."""
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


def choose_queries(labels: Tensor | None, among: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Draw indices at random, taking turns between the classes if there are labels."""
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
    if len(turns) > count:  # more classes than queries: draw the classes at random too
        chosen = [entry for entry in order if entry[0] == 0]
    return [index for _, _, index in chosen[:count]]


def nearest_candidates(
    queries: Tensor, candidates: Tensor, count: int, exclude: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and indices [Q,R] of the nearest candidates; `exclude` is each query's own index among them."""
    cosines = queries @ candidates.T
    if exclude is not None:
        cosines[torch.arange(len(exclude)), torch.tensor(exclude, dtype=torch.long)] = -torch.inf
    kept = max(0, min(count, len(candidates) - (exclude is not None)))
    best, indices = cosines.topk(kept, dim=1)
    return best, indices
