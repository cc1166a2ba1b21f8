"""The operations of the fused kernels on a tile [R, Q] (rows, columns) of red, green and blue in registers.

`drawn` points to the view's parameters as `triton_draws` writes them. `resample` and `color` define the operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kontrast.views import color

RED, GREEN, BLUE = tl.constexpr(color.RED), tl.constexpr(color.GREEN), tl.constexpr(color.BLUE)
FLIP, JITTER, FACTORS, HUE, ORDER, GRAY, BLUR, SIGMA, SOLARIZE = (
    tl.constexpr(i) for i in (4, 5, 6, 9, 10, 11, 12, 13, 14)
)
MEAN, INVERSE = tl.constexpr(15), tl.constexpr(18)
CONTRAST, SATURATION, TURN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def locate_tile(SIZE: tl.constexpr, R: tl.constexpr, Q: tl.constexpr):
    """Return this program's rows [R], columns [Q], view, mask [R, Q] of the view, tile and number of tiles."""
    across: tl.constexpr = (SIZE + Q - 1) // Q
    tiles: tl.constexpr = across * ((SIZE + R - 1) // R)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = tile // across * R + tl.arange(0, R)
    column = tile % across * Q + tl.arange(0, Q)
    return row, column, n, (row < SIZE)[:, None] & (column < SIZE)[None, :], tile, tiles


@triton.jit
def clamp(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def kernel(distance, CUBIC: tl.constexpr):
    if CUBIC:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        return tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0))
    else:
        return tl.maximum(1 - distance, 0.0)


@triton.jit
def weight(center, narrow, pixel, low, high, CUBIC: tl.constexpr):
    return tl.where((pixel >= low) & (pixel < high), kernel(tl.abs(pixel + 0.5 - center) * narrow, CUBIC), 0.0)


@triton.jit
def resample_axis(start, length, extent, place, SIZE: tl.constexpr, CUBIC: tl.constexpr, BOXED: tl.constexpr):
    """Return centers, narrowing, first tap, number of taps, limits and one over the weights' sum along one axis."""
    scale = length / SIZE
    narrow = 1 / tl.maximum(scale, 1.0)
    reach = tl.maximum(scale, 1.0) * (2.0 if CUBIC else 1.0)
    center = start + (place + 0.5) * scale
    first = tl.floor(center - reach + 0.5)
    count = tl.ceil(2 * reach).to(tl.int32)
    low = start if BOXED else start * 0
    high = start + length if BOXED else extent
    total = tl.zeros_like(center)
    tap = 0
    while tap < count:  # `range` of a number from the device fails in the interpreter of Triton 3.6
        total += weight(center, narrow, first + tap, low, high, CUBIC)
        tap += 1
    return center, narrow, first, count, low, high, 1 / tl.where(total == 0, 1.0, total)


@triton.jit
def crop(
    image, step_c, step_h, step_w, drawn, extent_h, extent_w, row, column,
    SIZE: tl.constexpr, COLORS: tl.constexpr, CUBIC: tl.constexpr, BOXED: tl.constexpr,
):  # fmt: skip
    """Resample the view's box to red, green and blue in [0, 1] (three times the same for one channel)."""
    column = tl.where(tl.load(drawn + FLIP) > 0, SIZE - 1 - column, column)
    y, narrow_y, y0, count_y, low_y, high_y, norm_y = resample_axis(
        tl.load(drawn), tl.load(drawn + 2), extent_h, row, SIZE, CUBIC, BOXED
    )
    x, narrow_x, x0, count_x, low_x, high_x, norm_x = resample_axis(
        tl.load(drawn + 1), tl.load(drawn + 3), extent_w, column, SIZE, CUBIC, BOXED
    )
    red = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    green, blue = red, red
    tap_y = 0
    while tap_y < count_y:
        weight_y = weight(y, narrow_y, y0 + tap_y, low_y, high_y, CUBIC) * norm_y
        line = image + (y0 + tap_y).to(tl.int32)[:, None] * step_h
        tap_x = 0
        while tap_x < count_x:
            weight_x = weight(x, narrow_x, x0 + tap_x, low_x, high_x, CUBIC) * norm_x
            both = weight_y[:, None] * weight_x[None, :]
            pixel = line + (x0 + tap_x).to(tl.int32)[None, :] * step_w
            red += both * tl.load(pixel, both != 0, 0).to(tl.float32)
            if COLORS == 3:
                green += both * tl.load(pixel + step_c, both != 0, 0).to(tl.float32)
                blue += both * tl.load(pixel + 2 * step_c, both != 0, 0).to(tl.float32)
            tap_x += 1
        tap_y += 1
    red, green, blue = red * (1 / 255), green * (1 / 255), blue * (1 / 255)
    if CUBIC:
        red, green, blue = clamp(red), clamp(green), clamp(blue)
    return red, green, blue


@triton.jit
def luma(red, green, blue, COLORS: tl.constexpr):
    if COLORS == 3:
        return RED * red + GREEN * green + BLUE * blue
    else:
        return red


@triton.jit
def turned_channel(hue, value, chroma, complement: tl.constexpr):
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
    return (
        turned_channel(hue, value, chroma, 1 / 2),
        turned_channel(hue, value, chroma, 5 / 6),
        turned_channel(hue, value, chroma, 1 / 6),
    )


@triton.jit
def jitter_step(red, green, blue, operation, drawn, mean, COLORS: tl.constexpr):
    """Apply one operation of the jitter; only contrast uses `mean`."""
    if operation == TURN:
        if COLORS == 3:
            red, green, blue = turn_hue(red, green, blue, tl.load(drawn + HUE))
    else:
        factor = tl.load(drawn + FACTORS + operation)
        level = tl.where(operation == CONTRAST, (1 - factor) * mean, 0.0)
        share = tl.where(operation == SATURATION, 1 - factor, 0.0)
        base = luma(red, green, blue, COLORS) * share + level
        red = clamp(red * factor + base)
        if COLORS == 3:
            green, blue = clamp(green * factor + base), clamp(blue * factor + base)
    return red, green, blue


@triton.jit
def jitter(red, green, blue, drawn, inside, SIZE: tl.constexpr, COLORS: tl.constexpr):
    """Apply the four operations in the view's order to a tile that covers the whole view."""
    order = tl.load(drawn + ORDER).to(tl.int32)
    for place in tl.static_range(4):
        operation = (order >> (2 * place)) & 3
        level = 0.0
        if operation == CONTRAST:
            level = tl.sum(tl.where(inside, luma(red, green, blue, COLORS), 0.0)) / (SIZE * SIZE)
        red, green, blue = jitter_step(red, green, blue, operation, drawn, level, COLORS)
    return red, green, blue


@triton.jit
def jitter_half(red, green, blue, drawn, level, FROM_CONTRAST: tl.constexpr, COLORS: tl.constexpr):
    """Apply the operations before the contrast, or the contrast and those after it."""
    order = tl.load(drawn + ORDER).to(tl.int32)
    after = 0
    for place in tl.static_range(4):
        operation = (order >> (2 * place)) & 3
        after = tl.where(operation == CONTRAST, 1, after)
        if after == FROM_CONTRAST:
            red, green, blue = jitter_step(red, green, blue, operation, drawn, level, COLORS)
    return red, green, blue


@triton.jit
def solarize_and_normalize(x, drawn, channel: tl.constexpr):
    """Solarize if drawn, and normalize."""
    threshold = tl.where(tl.load(drawn + SOLARIZE) > 0, 0.5, 2.0)
    return (tl.where(x >= threshold, 1 - x, x) - tl.load(drawn + MEAN + channel)) * tl.load(drawn + INVERSE + channel)


@triton.jit
def store(to, step_c, step_h, step_w, row, column, inside, red, green, blue, COLORS: tl.constexpr):
    to += row[:, None] * step_h + column[None, :] * step_w
    tl.store(to, red, inside)
    if COLORS == 3:
        tl.store(to + step_c, green, inside)
        tl.store(to + 2 * step_c, blue, inside)


@triton.jit
def store_interleaved(to, step_h, row, column, red, green, blue, SIZE: tl.constexpr):
    """Store red, green, blue, red, ... in unbroken rows: three stores with gaps would each touch every sector."""
    R: tl.constexpr = row.shape[0]
    Q: tl.constexpr = column.shape[0]
    pixels = tl.reshape(tl.join(tl.join(red, blue), tl.join(green, blue)), [R, 4 * Q])  # red, green, blue, blue
    place = tl.arange(0, 4 * Q)
    source = tl.minimum(place // 3 * 4 + place % 3, 4 * Q - 1)
    line = tl.gather(pixels, tl.broadcast_to(source[None, :], [R, 4 * Q]), 1)
    start = tl.program_id(0) % ((SIZE + Q - 1) // Q) * (3 * Q)  # as in locate_tile, in a form that shows its alignment
    inside = (row < SIZE)[:, None] & ((place < 3 * Q) & (start + place < 3 * SIZE))[None, :]
    tl.store(to + row[:, None] * step_h + (start + place)[None, :], line, inside)
