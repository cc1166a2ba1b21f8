"""`draws.draw_rows` as one Triton kernel with a lane per view of each image; it gives the same bits.

Needs Triton, so it is imported only when the fused views run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kontrast import counters
from kontrast.views import draws

GOLDEN = tl.constexpr(counters.GOLDEN)
FIRST = tl.constexpr(counters.FIRST_FACTOR)
SECOND = tl.constexpr(counters.SECOND_FACTOR)
WORD = tl.constexpr(2**64 - 1)
ATTEMPTS = tl.constexpr(draws.ATTEMPTS)
AREA, RATIO = tl.constexpr(draws.AREA), tl.constexpr(draws.RATIO)
TOP, LEFT, FLIP, JITTER, BRIGHTNESS, CONTRAST, SATURATION, HUE, ORDER, GRAY, BLUR, SIGMA, SOLARIZE = (
    tl.constexpr(slot) for slot in range(draws.TOP, draws.SLOTS)
)
SCALE_LOW, SCALE_SPAN, LOG_LOW, LOG_SPAN, RATIO_LOW, RATIO_HIGH = (tl.constexpr(i) for i in range(6))
FLIP_P, JITTER_P, GRAY_P, BLUR_P, SOLARIZE_P = (tl.constexpr(i) for i in range(draws.FLIP_P, draws.SOLARIZE_P + 1))
LOW, SPAN, CENTER, FRACTION = (tl.constexpr(i) for i in (draws.LOW, draws.SPAN, draws.CENTER, draws.FRACTION))
COLUMNS = tl.constexpr(draws.COLUMNS)
WORD_0, WORD_1, WORD_2, WORD_3 = (tl.constexpr(word) for word in draws.ORDER_WORDS)
NORMAL = tl.constexpr(draws.NORMAL)
# Floats per view that the kernel writes: the fields of Draws, three means, three inverse deviations, and padding.
PARAMETERS = tl.constexpr(24)


@triton.jit
def mix(state):
    """Triton's own copy of `counters.finalize_tensor`: a kernel is compiled from its source and can't call that."""
    state = (state ^ (state >> 30)) * FIRST
    state = (state ^ (state >> 27)) * SECOND
    return state ^ (state >> 31)


@triton.jit
def bits(stream, slot: tl.constexpr):
    step: tl.constexpr = ((slot + 1) * GOLDEN) & WORD
    return (mix(stream + step) >> 40).to(tl.int64)


@triton.jit
def uniform(stream, slot: tl.constexpr):
    return bits(stream, slot).to(tl.float64) * 5.9604644775390625e-08  # 2 ** -24


@triton.jit
def happens(stream, row, inside, slot: tl.constexpr, column: tl.constexpr):
    return (uniform(stream, slot) < tl.load(row + column, inside, 0.0)).to(tl.float32)


@triton.jit
def within(stream, row, inside, slot: tl.constexpr, column: tl.constexpr):
    low, span = tl.load(row + LOW + column, inside, 0.0), tl.load(row + SPAN + column, inside, 0.0)
    return (low + uniform(stream, slot) * span).to(tl.float32)


@triton.jit
def crop_box(stream, row, inside, high, wide):
    """Return top, left, height and width of the first of ten attempts that fits, else of the largest centered box."""
    scale_low, scale_span = tl.load(row + SCALE_LOW, inside, 0.0), tl.load(row + SCALE_SPAN, inside, 0.0)
    log_low, log_span = tl.load(row + LOG_LOW, inside, 0.0), tl.load(row + LOG_SPAN, inside, 0.0)
    ratio_low, ratio_high = tl.load(row + RATIO_LOW, inside, 1.0), tl.load(row + RATIO_HIGH, inside, 1.0)
    height = tl.where(wide / high < ratio_low, tl.floor(wide / ratio_low + 0.5), high)
    width = tl.where(wide / high > ratio_high, tl.floor(high * ratio_high + 0.5), wide)
    height, width = tl.minimum(tl.maximum(height, 1.0), high), tl.minimum(tl.maximum(width, 1.0), wide)
    found = wide < 0
    for attempt in tl.static_range(ATTEMPTS):
        area = high * wide * (scale_low + uniform(stream, AREA + attempt) * scale_span)
        ratio = tl.exp(log_low + uniform(stream, RATIO + attempt) * log_span)
        h, w = tl.floor(tl.sqrt(area / ratio) + 0.5), tl.floor(tl.sqrt(area * ratio) + 0.5)
        take = (h >= 1) & (h <= high) & (w >= 1) & (w <= wide) & (found == 0)
        height, width = tl.where(take, h, height), tl.where(take, w, width)
        found = found | take
    free_rows, free_columns = (high - height).to(tl.int64), (wide - width).to(tl.int64)
    top = tl.where(found, bits(stream, TOP) * (free_rows + 1) >> 24, free_rows // 2)
    left = tl.where(found, bits(stream, LEFT) * (free_columns + 1) >> 24, free_columns // 2)
    return top.to(tl.float64), left.to(tl.float64), height, width


@triton.jit
def center_side(length, shorter, fraction, SIZE: tl.constexpr):
    """Return start and length of one side of the box that Resize and CenterCrop read."""
    resized = tl.floor(tl.floor(SIZE / fraction + 0.5) * length / shorter)
    spare = (resized - SIZE).to(tl.int64)
    half = spare // 2
    half += (spare & 1) * (half & 1)  # round halves to even
    return half.to(tl.float64) * (length / resized), SIZE * (length / resized)


@triton.jit
def draw_kernel(
    keys, sizes, table, out, batch, total, first_view, height, width,
    SIZED: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write [V * B, PARAMETERS] floats. Without SIZED every image is height x width."""
    place = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = place < total
    image, view = place % batch, place // batch
    row = table + view * COLUMNS
    key = tl.load(keys + image, inside, 0).to(tl.uint64, bitcast=True)
    stream = mix(key + (view + first_view + 1).to(tl.uint64) * GOLDEN)
    if SIZED:
        high = tl.load(sizes + image * 2, inside, 1).to(tl.float64)
        wide = tl.load(sizes + image * 2 + 1, inside, 1).to(tl.float64)
    else:
        high = tl.zeros([LANES], tl.float64) + height
        wide = tl.zeros([LANES], tl.float64) + width
    top, left, box_height, box_width = crop_box(stream, row, inside, high, wide)
    central = tl.load(row + CENTER, inside, 0.0) > 0
    fraction = tl.load(row + FRACTION, inside, 1.0)
    center_top, center_height = center_side(high, tl.minimum(high, wide), fraction, SIZE)
    center_left, center_width = center_side(wide, tl.minimum(high, wide), fraction, SIZE)
    out += place * PARAMETERS
    tl.store(out, tl.where(central, center_top, top).to(tl.float32), inside)
    tl.store(out + 1, tl.where(central, center_left, left).to(tl.float32), inside)
    tl.store(out + 2, tl.where(central, center_height, box_height).to(tl.float32), inside)
    tl.store(out + 3, tl.where(central, center_width, box_width).to(tl.float32), inside)
    tl.store(out + 4, happens(stream, row, inside, FLIP, FLIP_P), inside)
    tl.store(out + 5, happens(stream, row, inside, JITTER, JITTER_P), inside)
    tl.store(out + 6, within(stream, row, inside, BRIGHTNESS, 0), inside)
    tl.store(out + 7, within(stream, row, inside, CONTRAST, 1), inside)
    tl.store(out + 8, within(stream, row, inside, SATURATION, 2), inside)
    tl.store(out + 9, within(stream, row, inside, HUE, 3), inside)
    rank = bits(stream, ORDER) * 24 >> 24
    word = tl.where(rank < 12, tl.where(rank < 6, WORD_0, WORD_1), tl.where(rank < 18, WORD_2, WORD_3))
    tl.store(out + 10, (word >> rank % 6 * 8 & 255).to(tl.float32), inside)
    tl.store(out + 11, happens(stream, row, inside, GRAY, GRAY_P), inside)
    tl.store(out + 12, happens(stream, row, inside, BLUR, BLUR_P), inside)
    tl.store(out + 13, within(stream, row, inside, SIGMA, 4), inside)
    tl.store(out + 14, happens(stream, row, inside, SOLARIZE, SOLARIZE_P), inside)
    for i in tl.static_range(6):
        tl.store(out + 15 + i, tl.load(row + NORMAL + i, inside, 0.0).to(tl.float32), inside)
