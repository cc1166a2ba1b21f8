"""The views in Triton as `reference` defines them: one pass for small views, two to four for large or blurred ones.

A program makes one tile of one view; `drawn` points to the view's parameters as `triton_draws` writes them. Contrast
needs the mean of the whole picture. If a tile doesn't cover the view, a first pass stops before the contrast and leaves
the picture in a buffer of 16-bit fixed point and the tile's sum in `sums`; a second pass continues. Blur needs the
neighboring pixels, so it reads such a buffer, first along the rows, then along the columns.

Needs Triton, so it is imported only when the fused views run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kontrast.views.triton_draws import PARAMETERS
from kontrast.views.triton_pixels import (
    BLUR,
    GRAY,
    JITTER,
    SIGMA,
    crop,
    jitter,
    jitter_half,
    locate_tile,
    luma,
    solarize_and_normalize,
    store,
    store_interleaved,
)

FIXED = tl.constexpr(32767.0)  # 1.0 in a buffer: near one, finer than float16 in the same two bytes


@triton.jit
def view_kernel(
    images, step_b, step_c, step_h, step_w, sizes, height, width, parameters, batch,
    out, out_n, out_c, out_h, out_w, buffer, sums,
    SIZED: tl.constexpr, SIZE: tl.constexpr, COLORS: tl.constexpr, CUBIC: tl.constexpr, BOXED: tl.constexpr,
    JITTERS: tl.constexpr, BLURS: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr,
    R: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Crop, flip and continue up to the blur if the tile is WHOLE or nothing jitters, else up to the contrast."""
    row, column, n, inside, tile, tiles = locate_tile(SIZE, R, Q)
    image = n % batch
    drawn = parameters + n * PARAMETERS
    if SIZED:
        height, width = tl.load(sizes + image * 2).to(tl.int32), tl.load(sizes + image * 2 + 1).to(tl.int32)
    source = images + image * step_b
    red, green, blue = crop(
        source, step_c, step_h, step_w, drawn, height, width, row, column, SIZE, COLORS, CUBIC, BOXED
    )
    if JITTERS and not WHOLE:
        if tl.load(drawn + JITTER) > 0:
            red, green, blue = jitter_half(red, green, blue, drawn, 0.0, 0, COLORS)
            tl.store(sums + n * tiles + tile, tl.sum(tl.where(inside, luma(red, green, blue, COLORS), 0.0)))
        store_fixed(buffer, n, row, column, inside, red, green, blue, SIZE, COLORS)
    else:
        if JITTERS:  # noqa: SIM102 (one condition is known when compiling, the other when running)
            if tl.load(drawn + JITTER) > 0:
                red, green, blue = jitter(red, green, blue, drawn, inside, SIZE, COLORS)
        finish_color(
            red, green, blue, drawn, n, row, column, inside, out, out_n, out_c, out_h, out_w, buffer,
            SIZE, COLORS, BLURS, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def color_kernel(
    parameters, out, out_n, out_c, out_h, out_w, buffer, sums, SIZE: tl.constexpr, COLORS: tl.constexpr,
    BLURS: tl.constexpr, INTERLEAVED: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Continue from the contrast up to the blur; SUMS is the number of tiles rounded up to a power of two."""
    row, column, n, inside, _, tiles = locate_tile(SIZE, R, Q)
    drawn = parameters + n * PARAMETERS
    source = buffer + n * COLORS * SIZE * SIZE + row[:, None] * SIZE + column[None, :]
    red = load_fixed(source, inside)
    green, blue = red, red
    if COLORS == 3:
        green, blue = load_fixed(source + SIZE * SIZE, inside), load_fixed(source + 2 * SIZE * SIZE, inside)
    if tl.load(drawn + JITTER) > 0:
        lanes = tl.arange(0, SUMS)
        level = tl.sum(tl.load(sums + n * tiles + lanes, lanes < tiles, 0.0)) / (SIZE * SIZE)
        red, green, blue = jitter_half(red, green, blue, drawn, level, 1, COLORS)
    finish_color(
        red, green, blue, drawn, n, row, column, inside, out, out_n, out_c, out_h, out_w, buffer,
        SIZE, COLORS, BLURS, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def blur_kernel(
    parameters, out, out_n, out_c, out_h, out_w, source, buffer, SIZE: tl.constexpr, COLORS: tl.constexpr,
    RADIUS: tl.constexpr, ALONG_ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Blur in one direction with reflected edges: along the rows from `source` to `buffer`, else to `out`.

    Taps beyond 4 sigma are left out.
    """
    row, column, n, inside, _, _ = locate_tile(SIZE, R, Q)
    drawn = parameters + n * PARAMETERS
    if tl.load(drawn + BLUR) > 0:
        sigma = tl.load(drawn + SIGMA)
        reach = tl.minimum(tl.ceil(4 * sigma).to(tl.int32), RADIUS)
        source += n * COLORS * SIZE * SIZE
        here = source + row[:, None] * SIZE + column[None, :]
        red = load_fixed(here, inside)
        green, blue = red, red
        if COLORS == 3:
            green, blue = load_fixed(here + SIZE * SIZE, inside), load_fixed(here + 2 * SIZE * SIZE, inside)
        total = sigma * 0 + 1
        tap = 1
        while tap <= reach:
            share = tl.exp(-0.5 * (tap / sigma) * (tap / sigma))
            total += 2 * share
            if ALONG_ROWS:
                back = source + row[:, None] * SIZE + reflect(column - tap, SIZE)[None, :]
                ahead = source + row[:, None] * SIZE + reflect(column + tap, SIZE)[None, :]
            else:
                back = source + reflect(row - tap, SIZE)[:, None] * SIZE + column[None, :]
                ahead = source + reflect(row + tap, SIZE)[:, None] * SIZE + column[None, :]
            red += share * (load_fixed(back, inside) + load_fixed(ahead, inside))
            if COLORS == 3:
                green += share * (load_fixed(back + SIZE * SIZE, inside) + load_fixed(ahead + SIZE * SIZE, inside))
                blue += share * (
                    load_fixed(back + 2 * SIZE * SIZE, inside) + load_fixed(ahead + 2 * SIZE * SIZE, inside)
                )
            tap += 1
        red, green, blue = red / total, green / total, blue / total
        if ALONG_ROWS:
            store_fixed(buffer, n, row, column, inside, red, green, blue, SIZE, COLORS)
        else:
            store_view(
                red, green, blue, drawn, n, row, column, inside, out, out_n, out_c, out_h, out_w,
                SIZE, COLORS, INTERLEAVED,
            )  # fmt: skip


@triton.jit
def reflect(place, SIZE: tl.constexpr):
    place = tl.abs(place)
    return tl.where(place >= SIZE, 2 * SIZE - 2 - place, place)


@triton.jit
def load_fixed(source, inside):
    return tl.load(source, inside, 0).to(tl.float32) * (1 / FIXED)


@triton.jit
def store_fixed(buffer, n, row, column, inside, red, green, blue, SIZE: tl.constexpr, COLORS: tl.constexpr):
    """Store a tile in a buffer [V * B, COLORS, SIZE, SIZE]."""
    to = buffer + n * COLORS * SIZE * SIZE
    red, green, blue = to_fixed(red), to_fixed(green), to_fixed(blue)
    store(to, SIZE * SIZE, SIZE, 1, row, column, inside, red, green, blue, COLORS)


@triton.jit
def to_fixed(x):
    return (x * FIXED + 0.5).to(tl.int16)


@triton.jit
def finish_color(
    red, green, blue, drawn, n, row, column, inside, out, out_n, out_c, out_h, out_w, buffer,
    SIZE: tl.constexpr, COLORS: tl.constexpr, BLURS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Convert to grayscale if drawn; then store the view, or leave it in the buffer for its blur."""
    if COLORS == 3:
        gray = luma(red, green, blue, COLORS)
        grays = tl.load(drawn + GRAY) > 0
        red, green, blue = tl.where(grays, gray, red), tl.where(grays, gray, green), tl.where(grays, gray, blue)
    waits = False
    if BLURS:
        waits = tl.load(drawn + BLUR) > 0
    if waits:
        store_fixed(buffer, n, row, column, inside, red, green, blue, SIZE, COLORS)
    else:
        store_view(
            red, green, blue, drawn, n, row, column, inside, out, out_n, out_c, out_h, out_w, SIZE, COLORS, INTERLEAVED
        )


@triton.jit
def store_view(
    red, green, blue, drawn, n, row, column, inside, out, out_n, out_c, out_h, out_w,
    SIZE: tl.constexpr, COLORS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Solarize, normalize and store a tile of a view."""
    kind: tl.constexpr = out.dtype.element_ty
    red, green, blue = (
        solarize_and_normalize(red, drawn, 0).to(kind),
        solarize_and_normalize(green, drawn, 1).to(kind),
        solarize_and_normalize(blue, drawn, 2).to(kind),
    )
    if INTERLEAVED:
        store_interleaved(out + n * out_n, out_h, row, column, red, green, blue, SIZE)
    else:
        store(out + n * out_n, out_c, out_h, out_w, row, column, inside, red, green, blue, COLORS)
