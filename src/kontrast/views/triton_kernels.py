"""The views in Triton: what `reference` defines, in one pass for small views, in two to four for large or blurred ones.

A program makes one tile of one view. Contrast needs the mean of the whole picture: where a tile covers the view it is
at hand; else a first pass stops before the contrast, leaves the picture in a buffer of 16-bit fixed point and the
tile's share of the sum in `sums`, and a second goes on. Blur needs the neighbours: it reads such a buffer, first along
the lines, then along the columns.
Needs Triton; imported only where a fused implementation runs.
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
    cropped,
    finished,
    from_contrast,
    jittered,
    luma,
    store,
    store_interleaved,
    tile_of,
    until_contrast,
)

FIXED = tl.constexpr(32767.0)  # 1.0 in a buffer: finer than half precision near one, in the same two bytes


@triton.jit
def view_kernel(
    images, step_b, step_c, step_h, step_w, sizes, height, width, parameters, batch,
    out, out_n, out_c, out_h, out_w, buffer, sums,
    SIZED: tl.constexpr, SIZE: tl.constexpr, COLOURS: tl.constexpr, CUBIC: tl.constexpr, BOXED: tl.constexpr,
    JITTERS: tl.constexpr, BLURS: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr,
    R: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Crop and flip, then all up to the blur where the tile is WHOLE or nothing jitters, else up to the contrast."""
    row, column, n, inside, tile, tiles = tile_of(SIZE, R, Q)
    image = n % batch
    at = parameters + n * PARAMETERS
    if SIZED:
        height, width = tl.load(sizes + image * 2).to(tl.int32), tl.load(sizes + image * 2 + 1).to(tl.int32)
    source = images + image * step_b
    red, green, blue = cropped(
        source, step_c, step_h, step_w, at, height, width, row, column, SIZE, COLOURS, CUBIC, BOXED
    )
    if JITTERS and not WHOLE:
        if tl.load(at + JITTER) > 0:
            red, green, blue = until_contrast(red, green, blue, at, COLOURS)
            tl.store(sums + n * tiles + tile, tl.sum(tl.where(inside, luma(red, green, blue, COLOURS), 0.0)))
        keep(buffer, n, row, column, inside, red, green, blue, SIZE, COLOURS)
    else:
        if JITTERS:  # noqa: SIM102 (one condition is known when compiling, the other when running)
            if tl.load(at + JITTER) > 0:
                red, green, blue = jittered(red, green, blue, at, inside, SIZE, COLOURS)
        conclude(
            red, green, blue, at, n, row, column, inside, out, out_n, out_c, out_h, out_w, buffer,
            SIZE, COLOURS, BLURS, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def color_kernel(
    parameters, out, out_n, out_c, out_h, out_w, buffer, sums, SIZE: tl.constexpr, COLOURS: tl.constexpr,
    BLURS: tl.constexpr, INTERLEAVED: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """From the contrast on, up to the blur; SUMS is the number of tiles rounded up to a power of two."""
    row, column, n, inside, _, tiles = tile_of(SIZE, R, Q)
    at = parameters + n * PARAMETERS
    source = buffer + n * COLOURS * SIZE * SIZE + row[:, None] * SIZE + column[None, :]
    red = kept(source, inside)
    green, blue = red, red
    if COLOURS == 3:
        green, blue = kept(source + SIZE * SIZE, inside), kept(source + 2 * SIZE * SIZE, inside)
    if tl.load(at + JITTER) > 0:
        lanes = tl.arange(0, SUMS)
        level = tl.sum(tl.load(sums + n * tiles + lanes, lanes < tiles, 0.0)) / (SIZE * SIZE)
        red, green, blue = from_contrast(red, green, blue, at, level, COLOURS)
    conclude(
        red, green, blue, at, n, row, column, inside, out, out_n, out_c, out_h, out_w, buffer,
        SIZE, COLOURS, BLURS, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def blur_kernel(
    parameters, out, out_n, out_c, out_h, out_w, source, buffer, SIZE: tl.constexpr, COLOURS: tl.constexpr,
    RADIUS: tl.constexpr, ALONG_LINES: tl.constexpr, INTERLEAVED: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """One direction of the blur, the edge reflected: along the lines from `source` to `buffer`, else to `out`.

    Taps past 4 sigma of the view are left out.
    """
    row, column, n, inside, _, _ = tile_of(SIZE, R, Q)
    at = parameters + n * PARAMETERS
    if tl.load(at + BLUR) > 0:
        sigma = tl.load(at + SIGMA)
        reach = tl.minimum(tl.ceil(4 * sigma).to(tl.int32), RADIUS)
        source += n * COLOURS * SIZE * SIZE
        here = source + row[:, None] * SIZE + column[None, :]
        red = kept(here, inside)
        green, blue = red, red
        if COLOURS == 3:
            green, blue = kept(here + SIZE * SIZE, inside), kept(here + 2 * SIZE * SIZE, inside)
        total = sigma * 0 + 1
        tap = 1
        while tap <= reach:
            share = tl.exp(-0.5 * (tap / sigma) * (tap / sigma))
            total += 2 * share
            if ALONG_LINES:
                back = source + row[:, None] * SIZE + reflected(column - tap, SIZE)[None, :]
                ahead = source + row[:, None] * SIZE + reflected(column + tap, SIZE)[None, :]
            else:
                back = source + reflected(row - tap, SIZE)[:, None] * SIZE + column[None, :]
                ahead = source + reflected(row + tap, SIZE)[:, None] * SIZE + column[None, :]
            red += share * (kept(back, inside) + kept(ahead, inside))
            if COLOURS == 3:
                green += share * (kept(back + SIZE * SIZE, inside) + kept(ahead + SIZE * SIZE, inside))
                blue += share * (kept(back + 2 * SIZE * SIZE, inside) + kept(ahead + 2 * SIZE * SIZE, inside))
            tap += 1
        red, green, blue = red / total, green / total, blue / total
        if ALONG_LINES:
            keep(buffer, n, row, column, inside, red, green, blue, SIZE, COLOURS)
        else:
            deliver(
                red,
                green,
                blue,
                at,
                n,
                row,
                column,
                inside,
                out,
                out_n,
                out_c,
                out_h,
                out_w,
                SIZE,
                COLOURS,
                INTERLEAVED,
            )


@triton.jit
def reflected(place, SIZE: tl.constexpr):
    place = tl.abs(place)
    return tl.where(place >= SIZE, 2 * SIZE - 2 - place, place)


@triton.jit
def kept(source, inside):
    return tl.load(source, inside, 0).to(tl.float32) * (1 / FIXED)


@triton.jit
def keep(buffer, n, row, column, inside, red, green, blue, SIZE: tl.constexpr, COLOURS: tl.constexpr):
    """Into a buffer [V * B, COLOURS, SIZE, SIZE]."""
    to = buffer + n * COLOURS * SIZE * SIZE
    red, green, blue = fixed(red), fixed(green), fixed(blue)
    store(to, SIZE * SIZE, SIZE, 1, row, column, inside, red, green, blue, COLOURS)


@triton.jit
def fixed(x):
    return (x * FIXED + 0.5).to(tl.int16)


@triton.jit
def conclude(
    red, green, blue, at, n, row, column, inside, out, out_n, out_c, out_h, out_w, buffer,
    SIZE: tl.constexpr, COLOURS: tl.constexpr, BLURS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Grayscale where drawn; then the view is done, or waits in the buffer for its blur."""
    if COLOURS == 3:
        gray = luma(red, green, blue, COLOURS)
        grays = tl.load(at + GRAY) > 0
        red, green, blue = tl.where(grays, gray, red), tl.where(grays, gray, green), tl.where(grays, gray, blue)
    waits = False
    if BLURS:
        waits = tl.load(at + BLUR) > 0
    if waits:
        keep(buffer, n, row, column, inside, red, green, blue, SIZE, COLOURS)
    else:
        deliver(
            red, green, blue, at, n, row, column, inside, out, out_n, out_c, out_h, out_w, SIZE, COLOURS, INTERLEAVED
        )


@triton.jit
def deliver(
    red, green, blue, at, n, row, column, inside, out, out_n, out_c, out_h, out_w,
    SIZE: tl.constexpr, COLOURS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Solarize, normalise, store."""
    kind: tl.constexpr = out.dtype.element_ty
    red, green, blue = finished(red, at, 0).to(kind), finished(green, at, 1).to(kind), finished(blue, at, 2).to(kind)
    if INTERLEAVED:
        store_interleaved(out + n * out_n, out_h, row, column, red, green, blue, SIZE)
    else:
        store(out + n * out_n, out_c, out_h, out_w, row, column, inside, red, green, blue, COLOURS)
