"""The views in Triton: what `reference` defines, in one pass for small views and in two or three for large ones.

A program makes one tile [R, Q] (rows, columns) of one view, all its channels in registers. `at` points to the view's 16 parameters
(fields of Draws). Contrast needs the mean of the whole picture: where a tile covers the view it is at hand; else a first pass stops
before the contrast, leaves the picture in a buffer of 16-bit fixed point and the tile's share of the sum in `sums`, and a second
goes on. Blur needs the neighbours: it reads the buffer of what is before it. Needs Triton; imported only where a fused implementation runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kontrast.views import colour

RED, GREEN, BLUE = tl.constexpr(colour.RED), tl.constexpr(colour.GREEN), tl.constexpr(colour.BLUE)
PARAMETERS = tl.constexpr(16)
FLIP, JITTER, FACTORS, HUE, ORDER, GRAY, BLUR, SIGMA, SOLARIZE = (tl.constexpr(i) for i in (4, 5, 6, 9, 10, 11, 12, 13, 14))
FIXED = tl.constexpr(32767.0)  # 1.0 in the buffer: finer than half precision near one, in the same two bytes
CONTRAST, SATURATION, TURN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def kernel(distance, CUBIC: tl.constexpr):
    if CUBIC:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        return tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0))
    else:
        return tl.maximum(1 - distance, 0.0)


@triton.jit
def side(start, length, extent, place, SIZE: tl.constexpr, CUBIC: tl.constexpr, BOXED: tl.constexpr):
    """One axis of the resampling: centres, narrowing, first tap and number of taps, limits, and one over the sum of weights."""
    scale = length / SIZE
    narrow = 1 / tl.maximum(scale, 1.0)
    reach = tl.maximum(scale, 1.0) * (2.0 if CUBIC else 1.0)
    centre = start + (place + 0.5) * scale
    first = tl.floor(centre - reach + 0.5)
    count = tl.ceil(2 * reach).to(tl.int32)
    low = start if BOXED else start * 0
    high = start + length if BOXED else extent
    total = tl.zeros_like(centre)
    for tap in range(count):
        total += weight(centre, narrow, first + tap, low, high, CUBIC)
    return centre, narrow, first, count, low, high, 1 / tl.where(total == 0, 1.0, total)


@triton.jit
def weight(centre, narrow, pixel, low, high, CUBIC: tl.constexpr):
    return tl.where((pixel >= low) & (pixel < high), kernel(tl.abs(pixel + 0.5 - centre) * narrow, CUBIC), 0.0)


@triton.jit
def cropped(
    image, step_c, step_h, step_w, at, extent_h, extent_w, row, column,
    SIZE: tl.constexpr, COLOURS: tl.constexpr, CUBIC: tl.constexpr, BOXED: tl.constexpr,
):  # fmt: skip
    """The view's box resampled: a tile of red, green and blue in [0, 1] (three times the same for one channel)."""
    column = tl.where(tl.load(at + FLIP) > 0, SIZE - 1 - column, column)
    y, narrow_y, y0, count_y, low_y, high_y, norm_y = side(tl.load(at), tl.load(at + 2), extent_h, row, SIZE, CUBIC, BOXED)
    x, narrow_x, x0, count_x, low_x, high_x, norm_x = side(tl.load(at + 1), tl.load(at + 3), extent_w, column, SIZE, CUBIC, BOXED)
    red = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    green, blue = red, red
    for tap_y in range(count_y):
        weight_y = weight(y, narrow_y, y0 + tap_y, low_y, high_y, CUBIC) * norm_y
        line = image + (y0 + tap_y).to(tl.int32)[:, None] * step_h
        for tap_x in range(count_x):
            weight_x = weight(x, narrow_x, x0 + tap_x, low_x, high_x, CUBIC) * norm_x
            both = weight_y[:, None] * weight_x[None, :]
            pixel = line + (x0 + tap_x).to(tl.int32)[None, :] * step_w
            red += both * tl.load(pixel, both != 0, 0).to(tl.float32)
            if COLOURS == 3:
                green += both * tl.load(pixel + step_c, both != 0, 0).to(tl.float32)
                blue += both * tl.load(pixel + 2 * step_c, both != 0, 0).to(tl.float32)
    red, green, blue = red * (1 / 255), green * (1 / 255), blue * (1 / 255)
    if CUBIC:
        red, green, blue = clamp(red), clamp(green), clamp(blue)
    return red, green, blue


@triton.jit
def clamp(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def luma(red, green, blue, COLOURS: tl.constexpr):
    if COLOURS == 3:
        return RED * red + GREEN * green + BLUE * blue
    else:
        return red


@triton.jit
def turned(hue, value, chroma, complement: tl.constexpr):
    distance = hue - complement
    distance = tl.abs(distance - tl.floor(distance + 0.5))
    return value - chroma * clamp(2 - 6 * distance)


@triton.jit
def turn_hue(red, green, blue, turn):
    value = tl.maximum(tl.maximum(red, green), blue)
    chroma = value - tl.minimum(tl.minimum(red, green), blue)
    inverse = 1 / tl.maximum(6 * chroma, 1e-12)
    hue = tl.where(value == green, (blue - red) * inverse + 1 / 3, (red - green) * inverse + 2 / 3)
    hue = tl.where(value == red, (green - blue) * inverse, hue) + turn
    return turned(hue, value, chroma, 1 / 2), turned(hue, value, chroma, 5 / 6), turned(hue, value, chroma, 1 / 6)


@triton.jit
def operate(red, green, blue, operation, at, mean, COLOURS: tl.constexpr):
    """One operation of the jitter; `mean` is used by contrast alone."""
    if operation == TURN:
        if COLOURS == 3:
            red, green, blue = turn_hue(red, green, blue, tl.load(at + HUE))
    else:
        factor = tl.load(at + FACTORS + operation)
        level = tl.where(operation == CONTRAST, (1 - factor) * mean, 0.0)
        share = tl.where(operation == SATURATION, 1 - factor, 0.0)
        base = luma(red, green, blue, COLOURS) * share + level
        red = clamp(red * factor + base)
        if COLOURS == 3:
            green, blue = clamp(green * factor + base), clamp(blue * factor + base)
    return red, green, blue


@triton.jit
def finished(x, at, mean, inverse):
    threshold = tl.where(tl.load(at + SOLARIZE) > 0, 0.5, 2.0)
    return (tl.where(x >= threshold, 1 - x, x) - mean) * inverse


@triton.jit
def view_kernel(
    images, step_b, step_c, step_h, step_w, sizes, height, width, parameters, batch, out, out_n, out_c, out_h, out_w, buffer, sums,
    mean_r, mean_g, mean_b, inverse_r, inverse_g, inverse_b,
    SIZED: tl.constexpr, SIZE: tl.constexpr, COLOURS: tl.constexpr, CUBIC: tl.constexpr, BOXED: tl.constexpr,
    JITTERS: tl.constexpr, BLURS: tl.constexpr, WHOLE: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Crop and flip, then all up to the blur where the tile is WHOLE or nothing jitters, else up to the contrast."""
    row, column, n, inside, tile, tiles = tile_of(SIZE, R, Q)
    image = n % batch
    at = parameters + n * PARAMETERS
    if SIZED:
        height, width = tl.load(sizes + image * 2).to(tl.int32), tl.load(sizes + image * 2 + 1).to(tl.int32)
    source = images + image * step_b
    red, green, blue = cropped(source, step_c, step_h, step_w, at, height, width, row, column, SIZE, COLOURS, CUBIC, BOXED)
    order = tl.load(at + ORDER).to(tl.int32)
    if JITTERS and not WHOLE:
        if tl.load(at + JITTER) > 0:
            before = 1
            for place in tl.static_range(4):
                operation = (order >> (2 * place)) & 3
                before = tl.where(operation == CONTRAST, 0, before)
                if before == 1:
                    red, green, blue = operate(red, green, blue, operation, at, 0.0, COLOURS)
            total = tl.sum(tl.where(inside, luma(red, green, blue, COLOURS), 0.0))
            tl.store(sums + n * tiles + tile, total)
        keep(buffer, n, row, column, inside, red, green, blue, SIZE, COLOURS)
    else:
        if JITTERS:
            if tl.load(at + JITTER) > 0:
                for place in tl.static_range(4):
                    operation = (order >> (2 * place)) & 3
                    level = 0.0
                    if operation == CONTRAST:
                        level = tl.sum(tl.where(inside, luma(red, green, blue, COLOURS), 0.0)) / (SIZE * SIZE)
                    red, green, blue = operate(red, green, blue, operation, at, level, COLOURS)
        conclude(
            red, green, blue, at, n, row, column, inside, out, out_n, out_c, out_h, out_w, buffer,
            mean_r, mean_g, mean_b, inverse_r, inverse_g, inverse_b, SIZE, COLOURS, BLURS,
        )  # fmt: skip


@triton.jit
def colour_kernel(
    parameters, out, out_n, out_c, out_h, out_w, buffer, sums, mean_r, mean_g, mean_b, inverse_r, inverse_g, inverse_b,
    SIZE: tl.constexpr, COLOURS: tl.constexpr, BLURS: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """From the contrast on, up to the blur; SUMS is the number of tiles rounded up to a power of two."""
    row, column, n, inside, _, tiles = tile_of(SIZE, R, Q)
    at = parameters + n * PARAMETERS
    source = buffer + n * COLOURS * SIZE * SIZE + row[:, None] * SIZE + column[None, :]
    red = tl.load(source, inside, 0).to(tl.float32) * (1 / FIXED)
    green, blue = red, red
    if COLOURS == 3:
        green = tl.load(source + SIZE * SIZE, inside, 0).to(tl.float32) * (1 / FIXED)
        blue = tl.load(source + 2 * SIZE * SIZE, inside, 0).to(tl.float32) * (1 / FIXED)
    if tl.load(at + JITTER) > 0:
        order = tl.load(at + ORDER).to(tl.int32)
        lanes = tl.arange(0, SUMS)
        level = tl.sum(tl.load(sums + n * tiles + lanes, lanes < tiles, 0.0)) / (SIZE * SIZE)
        after = 0
        for place in tl.static_range(4):
            operation = (order >> (2 * place)) & 3
            after = tl.where(operation == CONTRAST, 1, after)
            if after == 1:
                red, green, blue = operate(red, green, blue, operation, at, level, COLOURS)
    conclude(
        red, green, blue, at, n, row, column, inside, out, out_n, out_c, out_h, out_w, buffer,
        mean_r, mean_g, mean_b, inverse_r, inverse_g, inverse_b, SIZE, COLOURS, BLURS,
    )  # fmt: skip


@triton.jit
def tile_of(SIZE: tl.constexpr, R: tl.constexpr, Q: tl.constexpr):
    """This program's rows [R], columns [Q], view, mask [R, Q] of what lies in the view, tile and number of tiles."""
    across: tl.constexpr = (SIZE + Q - 1) // Q
    tiles: tl.constexpr = across * ((SIZE + R - 1) // R)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = tile // across * R + tl.arange(0, R)
    column = tile % across * Q + tl.arange(0, Q)
    return row, column, n, (row < SIZE)[:, None] & (column < SIZE)[None, :], tile, tiles


@triton.jit
def store(to, step_c, step_h, step_w, row, column, inside, red, green, blue, COLOURS: tl.constexpr):
    to += row[:, None] * step_h + column[None, :] * step_w
    tl.store(to, red, inside)
    if COLOURS == 3:
        tl.store(to + step_c, green, inside)
        tl.store(to + 2 * step_c, blue, inside)


@triton.jit
def keep(buffer, n, row, column, inside, red, green, blue, SIZE: tl.constexpr, COLOURS: tl.constexpr):
    """Into the buffer [V * B, COLOURS, SIZE, SIZE]."""
    to = buffer + n * COLOURS * SIZE * SIZE
    red, green, blue = fixed(red), fixed(green), fixed(blue)
    store(to, SIZE * SIZE, SIZE, 1, row, column, inside, red, green, blue, COLOURS)


@triton.jit
def fixed(x):
    return (x * FIXED + 0.5).to(tl.int16)


@triton.jit
def conclude(
    red, green, blue, at, n, row, column, inside, out, out_n, out_c, out_h, out_w, buffer,
    mean_r, mean_g, mean_b, inverse_r, inverse_g, inverse_b, SIZE: tl.constexpr, COLOURS: tl.constexpr, BLURS: tl.constexpr,
):  # fmt: skip
    """Grayscale; then solarize, normalise and store, or leave the picture for the blur."""
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
        red, green = finished(red, at, mean_r, inverse_r), finished(green, at, mean_g, inverse_g)
        blue = finished(blue, at, mean_b, inverse_b)
        store(out + n * out_n, out_c, out_h, out_w, row, column, inside, red, green, blue, COLOURS)


@triton.jit
def bell(place, source, sigma, RADIUS: tl.constexpr):
    """Weights [T, E] of pixels `source` [E] for the tile's pixels `place` [T], in half precision, and the sums of those."""
    distance = source[None, :] - place[:, None]
    near = tl.exp(-0.5 * (distance / sigma) * (distance / sigma))
    near = tl.where(tl.abs(distance) <= RADIUS, near, 0.0).to(tl.float16)
    return near, tl.sum(near.to(tl.float32), 1)


@triton.jit
def reflected(place, SIZE: tl.constexpr):
    place = tl.abs(place)
    return tl.where(place >= SIZE, 2 * SIZE - 2 - place, place)


@triton.jit
def blur_kernel(
    parameters, out, out_n, out_c, out_h, out_w, buffer, mean_r, mean_g, mean_b, inverse_r, inverse_g, inverse_b,
    SIZE: tl.constexpr, COLOURS: tl.constexpr, RADIUS: tl.constexpr, T: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Both directions of the blur of a tile [T, T] as two products with banded matrices, on the matrix units.

    E >= T + 2 RADIUS is the side of what the tile reads. The matrices are in half precision, the sums in single.
    """
    row, column, n, inside, _, _ = tile_of(SIZE, T, T)
    at = parameters + n * PARAMETERS
    if tl.load(at + BLUR) > 0:
        sigma = tl.load(at + SIGMA)
        rows = tl.min(row, 0) - RADIUS + tl.arange(0, E)
        columns = tl.min(column, 0) - RADIUS + tl.arange(0, E)
        down, sum_down = bell(row, rows, sigma, RADIUS)
        across, sum_across = bell(column, columns, sigma, RADIUS)
        across = tl.trans(across)
        rows, columns = reflected(rows, SIZE), reflected(columns, SIZE)
        known = ((rows >= 0) & (rows < SIZE))[:, None] & ((columns >= 0) & (columns < SIZE))[None, :]
        source = buffer + n * COLOURS * SIZE * SIZE + rows[:, None] * SIZE + columns[None, :]
        to = out + n * out_n + row[:, None] * out_h + column[None, :] * out_w
        for c in tl.static_range(COLOURS):
            mean = mean_r if c == 0 else (mean_g if c == 1 else mean_b)
            inverse = inverse_r if c == 0 else (inverse_g if c == 1 else inverse_b)
            pixels = (tl.load(source + c * SIZE * SIZE, known, 0).to(tl.float32) * (1 / FIXED)).to(tl.float16)
            blurred = tl.dot((tl.dot(down, pixels) / sum_down[:, None]).to(tl.float16), across) / sum_across[None, :]
            tl.store(to + c * out_c, finished(blurred, at, mean, inverse), inside)
