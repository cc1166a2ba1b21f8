"""Triton kernels for small batches: the row statistics of views, and their gradient, in one launch each way.

V query views of B images, W key views of N images, D width, S scales (one or two), P links of a query view with key
views.  queries [V,B,D], keys [W,N,D], ids [B] and [N];  statistics and their gradients [S,P,B].

A program takes a block of few rows, so that small batches still fill the device, and reads its operands by plain
pointers, because tensor descriptors cost the host more time than such a kernel runs. LINKS says which key views a query
view is compared with; `link_index` has the cases. If STORED, s is a stored matrix [V*B,W*N], which is faster for wide
rows and for float32. If POSITIVE, the similarity of the link's two views of the same image counts too. ATTRACTION
stores -scale times that similarity. REPULSION, for two views, stores the loss of each row instead: the repulsion is the
lse (1), the mean (2), or HN-CL's (3).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kontrast.kernels.triton_fast_launch import FastKernel


@triton.jit
def link_index(v, w, V, W, LINKS: tl.constexpr):
    """Return the index of the statistics of query view v against key view w, or -1 if they are not compared.

    0: one statistic per query view, against all key views; 1: against the key view of the same index; 2: a statistic
    for each later key view; 3: for each other key view; 4: for each key view.
    """
    if LINKS == 0:
        return v
    elif LINKS == 1:
        return tl.where(v == w, v, -1)
    elif LINKS == 2:
        return tl.where(v < w, v * (2 * V - v - 1) // 2 + w - v - 1, -1)
    elif LINKS == 3:
        within = v * (W - 1) + w - tl.where(w > v, 1, 0)
        return tl.where(v >= W, W * (W - 1) + (v - W) * W + w, tl.where(v == w, -1, within))
    else:
        return v * W + w


@triton.jit
def pair_index(v, w, V, W, TEACHER: tl.constexpr):
    """Return the index of a pair of views among the similarities: v < w without a TEACHER, any two with one."""
    if TEACHER:
        return v * W + w
    else:
        low, high = tl.minimum(v, w), tl.maximum(v, w)
        return low * (2 * V - low - 1) // 2 + high - low - 1


@triton.jit
def load_block(source, view, image, images, D, d):
    """Load the rows of some images of one view."""
    place = (view * images + image).to(tl.int64)[:, None] * D + d[None, :]
    return tl.load(source + place, mask=(image < images)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def block_ids(ids, image, images, start, HAS_IDS: tl.constexpr):
    """Return the ids of some images: given, or their indices from `start` on."""
    if HAS_IDS:
        return tl.load(ids + image, mask=image < images, other=0)
    else:
        return (start + image).to(tl.int64)


@triton.jit
def load_tile(matrix, v, b, B, w, n, N, W):
    """Load a tile of the stored matrix s."""
    place = (v * B + b).to(tl.int64)[:, None] * (W * N) + (w * N + n)[None, :]
    return tl.load(matrix + place, mask=(b < B)[:, None] & (n < N)[None, :], other=0.0)


@FastKernel
@triton.jit(do_not_specialize=["V", "W", "B", "N", "P", "start"])
def views_forward(
    queries, keys, matrix, similarities, query_ids, key_ids, lse, mean, attraction, slopes,
    V, W, B, N, D, P, start, slope, second_slope, pull, push, log_count, log_share, log_rest, floor,
    LINKS: tl.constexpr, SCALES: tl.constexpr, HAS_IDS: tl.constexpr, WITH_MEAN: tl.constexpr,
    STORED: tl.constexpr, POSITIVE: tl.constexpr, ATTRACTION: tl.constexpr, REPULSION: tl.constexpr,
    TEACHER: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute lse and mean of one block of images of one query view, or of one link."""
    v, first, last = tl.program_id(1), 0, W
    if LINKS != 0:
        first = tl.program_id(1) % W
        v, last = tl.program_id(1) // W, first + 1
        if link_index(v, first, V, W, LINKS) < 0:
            return
    b, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    if not STORED:
        a = load_block(queries, v, b, B, D, d)
    row_ids = block_ids(query_ids, b, B, start, HAS_IDS)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total, weighted = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    second_top, second_total, second_weighted = top, total, weighted
    for w in range(first, last):
        for tile in range(tl.cdiv(N, BLOCK_N)):
            n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            if STORED:
                s = load_tile(matrix, v, b, B, w, n, N, W)
            else:
                k = load_block(keys, w, n, N, D, d)
                s = tl.dot(a, k.T, input_precision=PRECISION)
            same = row_ids[:, None] == block_ids(key_ids, n, N, 0, HAS_IDS)[None, :]
            excluded = same | (n >= N)[None, :]
            top, total, weighted = add_scaled(s, excluded, slope, top, total, weighted, WITH_MEAN)
            if SCALES == 2:
                second_top, second_total, second_weighted = add_scaled(
                    s, excluded, second_slope, second_top, second_total, second_weighted, WITH_MEAN
                )
    place = link_index(v, first, V, W, LINKS) * B + b
    if POSITIVE or ATTRACTION:
        pair = tl.program_id(1) * 0
        if LINKS != 0:  # of each query view with all key views there is one positive only if there is one pair of views
            pair = pair_index(v, first, V, W, TEACHER)
        positive = slope * tl.load(similarities + pair * B + b, mask=b < B, other=0.0)
        if ATTRACTION:
            tl.store(attraction + place, -0.6931471805599453 * positive, mask=b < B)
        if POSITIVE:
            new_top = tl.maximum(top, positive)
            total = total * tl.exp2(top - new_top) + tl.exp2(positive - new_top)
            top = new_top
    level, average = store_row(lse, mean, place, b < B, top, total, weighted, WITH_MEAN)
    easy = level
    if SCALES == 2:
        easy, _ = store_row(lse, mean, P * B + place, b < B, second_top, second_total, second_weighted, WITH_MEAN)
    if REPULSION != 0:
        attracted = pull * tl.load(similarities + b, mask=b < B, other=0.0)
        if REPULSION == 1:
            repelled = level
        elif REPULSION == 2:
            repelled = average
        else:
            repelled = debiased_repulsion(
                attracted, level - easy + log_count, log_share, log_rest, floor, slopes, place, b < B, P * B
            )
        tl.store(attraction + place, push * repelled - attracted, mask=b < B)


@triton.jit
def add_scaled(s, excluded, slope, top, total, weighted, WITH_MEAN: tl.constexpr):
    """Add one tile to the sums of its rows, relative to the largest exponent so far."""
    exponent = tl.where(excluded, float("-inf"), s * slope)
    new_top = tl.maximum(top, tl.max(exponent, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    parts, shrink = tl.exp2(exponent - shift[:, None]), tl.exp2(top - shift)
    if WITH_MEAN:
        weighted = weighted * shrink + tl.sum(parts * s, 1)
    return new_top, total * shrink + tl.sum(parts, 1), weighted


@triton.jit
def store_row(lse, mean, place, inside, top, total, weighted, WITH_MEAN: tl.constexpr):
    """Store the statistics and return them."""
    level, average = (top + tl.log2(total)) * 0.6931471805599453, total
    tl.store(lse + place, level, mask=inside)
    if WITH_MEAN:
        average = tl.where(total > 0, weighted / tl.where(total > 0, total, 1.0), 0.0)
        tl.store(mean + place, average, mask=inside)
    return level, average


@triton.jit
def debiased_repulsion(positive, log_R, log_share, log_rest, floor, slopes, place, inside, count):
    """Return log(exp(positive) + N) with HN-CL's N, and store its slopes.

    log N = log R + log(1 - exp(log_share + positive - log R)) - log_rest, at least `floor`. The slopes [3, count] are
    those of the row's loss: to the lse of both scales, and to the positive, including that of the attraction.
    """
    share = log_share + positive - log_R
    some_left = share < 0
    share = tl.where(some_left, share, -1.0)
    # 1 - exp(share), without cancellation for a share near zero.
    near = -share * (1.0 + share * (0.5 + share * (0.16666667 + share * 0.041666668)))
    left = tl.where(share > -0.05, near, 1.0 - tl.exp(share))
    log_N = log_R + tl.log(left) - log_rest
    above = some_left & (log_N > floor)
    log_N = tl.where(above, log_N, floor)
    top = tl.maximum(positive, log_N)
    total = top + tl.log(tl.exp(positive - top) + tl.exp(log_N - top))
    weight = tl.exp(log_N - total)
    to_log_R = tl.where(above, weight / left, 0.0)
    tl.store(slopes + place, to_log_R, mask=inside)
    tl.store(slopes + count + place, -to_log_R, mask=inside)
    tl.store(slopes + 2 * count + place, tl.where(above, -to_log_R, -weight), mask=inside)
    return total


@triton.jit
def side_gradient(
    s, lse, mean, grad_lse, grad_mean, statistic, link, b, B, inside, a,
    lse_link, lse_image, mean_link, mean_image,
    ROWS: tl.constexpr, HAS_LSE: tl.constexpr, HAS_MEAN: tl.constexpr, DETACHED: tl.constexpr,
):  # fmt: skip
    """Return w (alpha + beta s) of a tile, through the statistics of its rows (ROWS) or of its columns, at scale a.

    `statistic` is the place of the link's statistics; the gradients have strides of their own.
    """
    active = inside & (b * 0 + link >= 0)
    level = tl.load(lse + statistic + b, mask=active, other=float("-inf"))
    empty = level == float("-inf")
    shift = tl.where(empty, 0.0, level * 1.4426950408889634)
    alpha, beta = tl.zeros_like(level), tl.zeros_like(level)
    if HAS_LSE:
        alpha += a * tl.load(grad_lse + link * lse_link + b * lse_image, mask=active, other=0.0)
    if HAS_MEAN:
        incoming = tl.load(grad_mean + link * mean_link + b * mean_image, mask=active, other=0.0)
        if DETACHED:
            alpha += incoming
        else:
            alpha += (1 - a * tl.load(mean + statistic + b, mask=active, other=0.0)) * incoming
            beta = a * incoming
    alpha, beta = tl.where(empty, 0.0, alpha), tl.where(empty, 0.0, beta)
    if ROWS:
        alpha, beta, shift = alpha[:, None], beta[:, None], shift[:, None]
    else:
        alpha, beta, shift = alpha[None, :], beta[None, :], shift[None, :]
    # A row without pairs has no lse to subtract; its exponent is capped, and its coefficients are zero.
    weight = tl.exp2(tl.minimum(s * (a * 1.4426950408889634) - shift, 64.0))
    if HAS_MEAN and not DETACHED:
        return weight * (alpha + beta * s)
    else:
        return weight * alpha


@FastKernel
@triton.jit(do_not_specialize=["V", "W", "B", "N", "P", "start", "lse_scale", "lse_link", "lse_image", "mean_scale",
                               "mean_link", "mean_image"])  # fmt: skip
def stored_gradient(
    matrix, query_ids, key_ids, lse, mean, grad_lse, grad_mean, out, V, W, B, N, P, start, scale, second_scale,
    lse_scale, lse_link, lse_image, mean_scale, mean_link, mean_image,
    LINKS: tl.constexpr, SCALES: tl.constexpr, HAS_IDS: tl.constexpr, COLUMN_SIDE: tl.constexpr,
    HAS_LSE: tl.constexpr, HAS_MEAN: tl.constexpr, DETACHED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store d loss / d s of one tile [V*B,W*N], through its rows' statistics, and with COLUMN_SIDE its columns'."""
    v, w = tl.program_id(2) // W, tl.program_id(2) % W
    b, n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    s = load_tile(matrix, v, b, B, w, n, N, W)
    own, others = link_index(v, w, V, W, LINKS), -1
    if COLUMN_SIDE:
        others = link_index(w, v, V, W, LINKS)
    p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for m in tl.static_range(SCALES):
        a = scale if m == 0 else second_scale
        from_lse, from_mean = grad_lse + m * lse_scale, grad_mean + m * mean_scale
        p += side_gradient(
            s, lse, mean, from_lse, from_mean, (m * P + own) * B, own, b, B, b < B, a,
            lse_link, lse_image, mean_link, mean_image, True, HAS_LSE, HAS_MEAN, DETACHED,
        )  # fmt: skip
        if COLUMN_SIDE:
            p += side_gradient(
                s, lse, mean, from_lse, from_mean, (m * P + others) * B, others, n, B, n < N, a,
                lse_link, lse_image, mean_link, mean_image, False, HAS_LSE, HAS_MEAN, DETACHED,
            )  # fmt: skip
    same = block_ids(query_ids, b, B, start, HAS_IDS)[:, None] == block_ids(key_ids, n, N, 0, HAS_IDS)[None, :]
    p = tl.where(same, 0.0, p)
    place = (v * B + b).to(tl.int64)[:, None] * (W * N) + (w * N + n)[None, :]
    tl.store(out + place, p.to(out.dtype.element_ty), mask=(b < B)[:, None] & (n < N)[None, :])


@FastKernel
@triton.jit(do_not_specialize=["V", "W", "R", "C", "B", "P", "start", "column_start", "lse_scale", "lse_link",
                               "lse_image", "mean_scale", "mean_link", "mean_image"])  # fmt: skip
def views_backward(
    rows_of, columns_of, row_ids_of, column_ids_of, lse, mean, grad_lse, grad_mean, out,
    V, W, R, C, D, B, P, start, column_start, scale, second_scale,
    lse_scale, lse_link, lse_image, mean_scale, mean_link, mean_image,
    LINKS: tl.constexpr, SCALES: tl.constexpr, HAS_IDS: tl.constexpr, ROW_SIDE: tl.constexpr, COLUMN_SIDE: tl.constexpr,
    HAS_LSE: tl.constexpr, HAS_MEAN: tl.constexpr, DETACHED: tl.constexpr,
    PRECISION: tl.constexpr, SECOND_PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of images of one view, against all views of the other side.

    ROW_SIDE: the rows are queries, and their own statistics have a gradient. COLUMN_SIDE: the columns are queries, and
    the rows are their keys. Both: the queries are the keys.
    """
    x = tl.program_id(1)
    r, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    rows = load_block(rows_of, x, r, R, D, d)
    row_ids = block_ids(row_ids_of, r, R, start, HAS_IDS)
    gradient = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    other_views = W
    if not ROW_SIDE:
        other_views = V
    for y in range(other_views):
        own, others = -1, -1
        if ROW_SIDE:
            own = link_index(x, y, V, W, LINKS)
        if COLUMN_SIDE:
            others = link_index(y, x, V, W, LINKS)
        if (own >= 0) | (others >= 0):
            for tile in range(tl.cdiv(C, BLOCK_N)):
                c = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                columns = load_block(columns_of, y, c, C, D, d)
                s = tl.dot(rows, columns.T, input_precision=PRECISION)
                p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for m in tl.static_range(SCALES):
                    a = scale if m == 0 else second_scale
                    from_lse, from_mean = grad_lse + m * lse_scale, grad_mean + m * mean_scale
                    if ROW_SIDE:
                        p += side_gradient(
                            s, lse, mean, from_lse, from_mean, (m * P + own) * B, own, r, B, r < R, a,
                            lse_link, lse_image, mean_link, mean_image, True, HAS_LSE, HAS_MEAN, DETACHED,
                        )  # fmt: skip
                    if COLUMN_SIDE:
                        p += side_gradient(
                            s, lse, mean, from_lse, from_mean, (m * P + others) * B, others, c, B, c < C, a,
                            lse_link, lse_image, mean_link, mean_image, False, HAS_LSE, HAS_MEAN, DETACHED,
                        )  # fmt: skip
                same = row_ids[:, None] == block_ids(column_ids_of, c, C, column_start, HAS_IDS)[None, :]
                p = tl.where(same | (c >= C)[None, :], 0.0, p)
                if WIDE:
                    gradient = tl.dot(p, columns.to(tl.float32), gradient, input_precision=SECOND_PRECISION)
                else:
                    gradient = tl.dot(p.to(columns.dtype), columns, gradient, input_precision=SECOND_PRECISION)
    place = (x * R + r).to(tl.int64)[:, None] * D + d[None, :]
    tl.store(out + place, gradient.to(out.dtype.element_ty), mask=(r < R)[:, None] & (d < D)[None, :])
