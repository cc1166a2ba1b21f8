"""One picture of some test images with what a detector found, for the report: real boxes are dotted."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kontrast.data.annotated import AnnotatedImages
from kontrast.detection import Detections
from kontrast.files import write_atomic

COUNT, COLUMNS, SIDE = 8, 4, 288
LEAST_SCORE = 0.3
COLORS = ("#e6194b", "#3cb44b", "#ffe119", "#4363d8", "#f58231", "#911eb4", "#42d4f4", "#f032e6", "#bfef45", "#fabed4")


def write_pictures(folder: Path, task: str, images: AnnotatedImages, found: Sequence[Detections]) -> Path:
    """Write transfer-TASK.png in a run folder: some test images with the detections that are likely."""
    from PIL import Image

    count = min(COUNT, len(images))
    shown = [place * len(images) // count for place in range(count)]
    pictures = [
        draw_detections(images.pixels(i), found[i], images.classes, images.objects(i, False).boxes) for i in shown
    ]
    rows = [pictures[start : start + COLUMNS] for start in range(0, count, COLUMNS)]
    tops = [0, *itertools.accumulate(max(picture.height for picture in row) for row in rows)]
    sheet = Image.new("RGB", (SIDE * min(COLUMNS, count), tops[-1]), "white")
    for row, top in zip(rows, tops):
        for place, picture in enumerate(row):
            sheet.paste(picture, (SIDE * place, top))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    path = folder / f"transfer-{task}.png"
    write_atomic(path, buffer.getvalue())
    return path


def draw_detections(pixels: Tensor, found: Detections, classes: Sequence[str], boxes: Tensor, side: int = SIDE) -> Any:
    """Return an image with its likely detections as a picture of PIL, whose longer side is given."""
    from PIL import Image, ImageColor, ImageDraw, ImageFont

    height, width = pixels.shape[1:]
    scale = side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    shown = pixels.float()
    likely = (found.scores >= LEAST_SCORE).nonzero()[:, 0].tolist()
    if found.masks is not None:
        masks = found.decoded_masks()
        for k in likely:
            paint = torch.tensor(ImageColor.getrgb(COLORS[int(found.labels[k]) % len(COLORS)])).float()
            shown = torch.where(masks[k], 0.5 * shown + 0.5 * paint[:, None, None], shown)
    content = shown.round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    resample = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BILINEAR
    picture = Image.fromarray(content).resize(size, resample)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    for box in boxes.tolist():
        _dotted(draw, [scale * value for value in box])
    for k in likely:
        color = COLORS[int(found.labels[k]) % len(COLORS)]
        left, top, right, bottom = (scale * value for value in found.boxes[k].tolist())
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=color, width=2)
        text, corner = f"{classes[int(found.labels[k])]} {found.scores[k]:.2f}", (left, max(0.0, top - 14))
        draw.rectangle(draw.textbbox(corner, text, font=font), fill=color)
        draw.text(corner, text, fill="black", font=font)
        for x, y, _ in [] if found.keypoints is None else found.keypoints[k].tolist():
            draw.ellipse((scale * x - 3, scale * y - 3, scale * x + 3, scale * y + 3), fill=color, outline="black")
    return picture


def _dotted(draw: Any, box: Sequence[float]) -> None:
    left, top, right, bottom = box
    for x in range(int(left), int(right), 6):
        draw.line([(x, top), (x + 2, top)], fill="white")
        draw.line([(x, bottom), (x + 2, bottom)], fill="white")
    for y in range(int(top), int(bottom), 6):
        draw.line([(left, y), (left, y + 2)], fill="white")
        draw.line([(right, y), (right, y + 2)], fill="white")
