"""The pictures of a report: a 2-D map of test images, and the nearest neighbors of a few of them.

Writes two files into a run folder: `gallery.png`, one sprite of square tiles in row-major order, and `gallery.json`,
which describes each tile. The JSON holds the sprite's SHA-256, so that a reader can tell if the two belong together.

Shapes: N test images, T train images, F features, Q queries, R neighbors of each.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from kontrast.files import write_atomic
from kontrast.lens.map_2d import FEWEST, LIMIT, map_to_plane
from kontrast.lens.measures import directions

TILE = 32
COLUMNS = 40
QUERIES, NEIGHBORS = 12, 8


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
        grid = torch.zeros(rows * COLUMNS, 3, TILE, TILE, dtype=torch.uint8)
        for number, picture in enumerate(self.pictures):
            grid[number] = picture
        return encode_png(grid.unflatten(0, (rows, COLUMNS)).permute(2, 0, 3, 1, 4).flatten(1, 2).flatten(2))


@dataclass(frozen=True)
class GallerySplit:
    """The name of a split, "train" or "test", the features [N,F] of its images, and the `data.ImageSet` itself."""

    source: str
    features: Tensor
    images: Any

    def directions(self) -> Tensor:
        """Return the features as unit vectors, float32 on the CPU."""
        return directions(self.features.detach().to("cpu", torch.float32))

    def entry(self, tiles: Tiles, index: int) -> dict[str, Any]:
        """Return tile, label and name of one image; a negative label means none."""
        label = -1 if self.images.labels is None else int(self.images.labels[index])
        name = str(self.images.names[index])
        tile = tiles.add(self.source, self.images.pictures, index)
        return {"tile": tile, "label": None if label < 0 else label, "name": name}


def write_gallery(
    folder: Path, test: GallerySplit, train: GallerySplit | None = None, points: int = 1000, seed: int = 0
) -> None:
    """Write gallery.json and gallery.png: a map of at most `points` test images, and the neighbors of a few.

    Neighbors are searched by cosine among the train images, or among the other test images if there are none.
    """
    generator = torch.Generator().manual_seed(seed)
    unit, tiles = test.directions(), Tiles()
    sample = torch.randperm(len(unit), generator=generator)[: min(points, LIMIT)].sort().values
    chosen = choose_queries(test.images.labels, sample, QUERIES, generator)
    places = zip(sample.tolist(), map_to_plane(unit[sample], seed=seed).tolist())
    mapped = [{"x": round(x, 3), "y": round(y, 3), **test.entry(tiles, index)} for index, (x, y) in places]
    pool = train or test
    similar = unit[chosen] @ pool.directions().T
    if train is None:  # no image is its own neighbor
        similar[torch.arange(len(chosen)), torch.tensor(chosen, dtype=torch.long)] = -torch.inf
    cosines, near = similar.topk(max(0, min(NEIGHBORS, similar.shape[1] - (train is None))), dim=1)
    shown = []
    for query, row, indices in zip(chosen, cosines.tolist(), near.tolist()):
        found = [{**pool.entry(tiles, i), "similarity": round(cosine, 4)} for cosine, i in zip(row, indices)]
        shown.append({**test.entry(tiles, query), "neighbours": found})
    labels = [split.images.labels for split in (test, train) if split is not None]
    sprite = tiles.sprite()
    tree = {
        "version": 1,
        "classes": test.images.classes,
        "classes_present": len({n for column in labels if column is not None for n in column.tolist() if n >= 0}),
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
        smooth = interpolate(picture[None].float(), size, mode="bilinear", align_corners=False, antialias=True)
        picture = smooth[0].round().clamp(0, 255).to(torch.uint8)
    rows, columns = TILE - picture.shape[1], TILE - picture.shape[2]
    return pad(picture, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


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
