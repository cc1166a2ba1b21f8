"""Draws how an objective pulls and pushes, as inline SVG in the colors of the page."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch

from builder.objective_slopes import COSINES, has_rows, slopes
from kontrast.objectives import OBJECTIVES

WIDTH, HEIGHT, LEFT, BOTTOM = 420, 210, 52, 34
Curve = list[float]


def weight_pictures() -> dict[str, str]:
    """Return the pictures of all objectives by name, computed by a few processes of one thread each."""
    names = sorted(OBJECTIVES)
    fresh = multiprocessing.get_context("spawn")  # torch's threads don't survive a fork
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), mp_context=fresh, initializer=use_one_thread) as pool:
        return dict(zip(names, pool.map(weight_picture, names)))


def use_one_thread() -> None:
    torch.set_num_threads(1)


def weight_picture(name: str) -> str:
    """Return a figure of an objective's slopes at its default settings, in HTML."""
    positive, negative = ([round(x, 9) for x in slopes(name, which)] for which in ("positive", "negative"))
    pulled, pushed = "the positive", "a negative"
    for need, learned in (("needs_labels", "class"), ("needs_prototypes", "prototype")):
        if getattr(OBJECTIVES[name], need):
            pulled, pushed = f"its {learned}", f"another {learned}"
    drawn = draw(positive, negative, pulled, pushed)
    label = f"Pull of {pulled} and push of {pushed} by cosine similarity"
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return (
        f'<figure class="weights">{head}{drawn}</svg><figcaption>{caption(name, pulled, pushed)}</figcaption></figure>'
    )


def caption(name: str, pulled: str, pushed: str) -> str:
    of = "one anchor" if has_rows(name) else "the batch, times its anchors,"
    return (
        f"How the loss of {of} changes with the cosine of the anchor and {pulled} (solid) or {pushed} (dashed). Below "
        "zero the loss pulls, above zero it pushes. Computed by autograd at the default settings, among random rows."
    )


def draw(positive: Curve, negative: Curve, pulled: str, pushed: str) -> str:
    """Draw both curves with their axes as the content of an SVG element."""
    low, high = min(*positive, *negative, 0.0), max(*positive, *negative, 0.0)
    span = (high - low) or 1.0

    def at(cosine: float, value: float) -> tuple[float, float]:
        x = LEFT + (cosine + 1) / 2 * (WIDTH - LEFT - 12)
        return x, 12 + (high - value) / span * (HEIGHT - BOTTOM - 24)

    zero, right = at(-1, 0)[1], at(1, 0)[0]
    parts = [f'<line class="axis" x1="{LEFT}" y1="{zero:.1f}" x2="{right:.1f}" y2="{zero:.1f}"/>']
    for cosine in (-1, 0, 1):
        parts.append(f'<text x="{at(cosine, 0)[0]:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{cosine}</text>')
    parts.append(f'<text x="{at(0, 0)[0]:.1f}" y="{HEIGHT - 3}" text-anchor="middle">cosine similarity</text>')
    for value in sorted({low, 0.0, high}):
        y = at(0, value)[1] + 4
        parts.append(f'<text x="{LEFT - 6}" y="{y:.1f}" text-anchor="end">{number(value)}</text>')
    for curve, kind in ((positive, "pull"), (negative, "push")):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(c, v) for c, v in zip(COSINES, curve)))
        parts.append(f'<polyline class="curve {kind}" points="{line}"/>')
    return "".join(parts) + legend(pulled, pushed)


def legend(pulled: str, pushed: str) -> str:
    return "".join(
        f'<text class="{kind}" x="{x}" y="{HEIGHT - 3}" text-anchor="{anchor}">{text}</text>'
        for kind, text, x, anchor in (("pull", pulled, LEFT, "start"), ("push", pushed, WIDTH - 8, "end"))
    )


def number(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}".replace("-", "−")
