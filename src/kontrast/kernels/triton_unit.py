"""Triton kernels that normalize rows and compute the similarities of each image's views, in one launch each way.

V query views, W key views, B images, D width, L pairs of views.  z [V,B,D], keys [W,B,D], similarities [L,B].  PAIRED:
z are two tensors [B,D], one per view.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kontrast.kernels.triton_fast_launch import FastKernel
from kontrast.kernels.triton_small_batch import link_index, pair_index


@triton.jit
def view_rows(z, z2, v, b, B, d, D, PAIRED: tl.constexpr):
    """Return pointers to the rows of some images of view v."""
    if PAIRED:
        return tl.where(v == 0, z, z2) + (b.to(tl.int64)[:, None] * D + d[None, :])
    else:
        return z + ((b + v * B).to(tl.int64)[:, None] * D + d[None, :])


@triton.jit
def load_rows(place, mask, shortest, NORMALIZE: tl.constexpr):
    """Return a block of rows as unit vectors and the inverse of their lengths.

    A row that is not longer than `shortest` is returned as it is. One whose length overflows becomes NaN, not a zero
    that looks right.
    """
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.full([x.shape[0]], 1.0, tl.float32)
    if NORMALIZE:
        norm = tl.sqrt(tl.sum(x * x, 1))
        inverse = tl.where(norm > shortest, 1.0 / norm, 1.0)
        inverse = tl.where(norm == float("inf"), float("nan"), inverse)
        x = x * inverse[:, None]
    return x, inverse


@FastKernel
@triton.jit(do_not_specialize=["V", "W", "B"])
def unit_forward(
    z, z2, keys, units, key_units, similarities, ids, V, W, B, D, shortest,
    PAIRED: tl.constexpr, TEACHER: tl.constexpr, NORMALIZE: tl.constexpr, WRITE_IDS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write unit rows, and the similarity of view v to each later view, or with a TEACHER to each view of the keys.

    WRITE_IDS: write the index of each row's image too.
    """
    b, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    mask = (b < B)[:, None] & (d < D)[None, :]
    for v in range(V):
        if WRITE_IDS:
            tl.store(ids + v * B + b, b.to(tl.int64), mask=b < B)
        x, _ = load_rows(view_rows(z, z2, v, b, B, d, D, PAIRED), mask, shortest, NORMALIZE)
        if NORMALIZE:
            tl.store(view_rows(units, units, v, b, B, d, D, False), x.to(units.dtype.element_ty), mask=mask)
        first = v + 1
        if TEACHER:
            first = 0
        for w in range(first, W):
            if TEACHER:
                other = view_rows(keys, keys, w, b, B, d, D, False)
            else:
                other = view_rows(z, z2, w, b, B, d, D, PAIRED)
            y, _ = load_rows(other, mask, shortest, NORMALIZE)
            if TEACHER and NORMALIZE:  # noqa: SIM102 (the outer `if` is evaluated when the kernel is compiled)
                if v == 0:
                    place = view_rows(key_units, key_units, w, b, B, d, D, False)
                    tl.store(place, y.to(key_units.dtype.element_ty), mask=mask)
            pair = pair_index(v, w, V, W, TEACHER)
            tl.store(similarities + pair * B + b, tl.sum(x * y, 1), mask=b < B)


@triton.jit
def link_gradient(
    similarity, others, grad_others, grad_attraction, link, b, B, scale, pull, mask,
    others_link, others_image, attraction_link, attraction_image, POSITIVE: tl.constexpr, ATTRACTION: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the similarity of a link's two views, through its statistics and its attraction."""
    active = mask & (b * 0 + link >= 0)
    gradient = tl.zeros_like(similarity)
    if POSITIVE:
        level = tl.load(others + link * B + b, mask=active, other=0.0)
        incoming = tl.load(grad_others + link * others_link + b * others_image, mask=active, other=0.0)
        gradient += scale * incoming * tl.exp(scale * similarity - level)
    if ATTRACTION:
        incoming = tl.load(grad_attraction + link * attraction_link + b * attraction_image, mask=active, other=0.0)
        gradient -= pull * incoming
    return tl.where(active, gradient, 0.0)


@FastKernel
@triton.jit(do_not_specialize=["V", "W", "B", "pair_stride", "image_stride", "others_link", "others_image",
                               "attraction_link", "attraction_image"])  # fmt: skip
def unit_backward(
    z, z2, keys, grad_units, grad_similarities, similarities, others, grad_others, grad_attraction, out,
    V, W, B, D, scale, pull, shortest,
    pair_stride, image_stride, others_link, others_image, attraction_link, attraction_image,
    HAS_UNITS: tl.constexpr, HAS_SIMILARITIES: tl.constexpr, POSITIVE: tl.constexpr, ATTRACTION: tl.constexpr,
    LINKS: tl.constexpr, PAIRED: tl.constexpr, TEACHER: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one view of z, through its unit rows and through its similarities to other views.

    POSITIVE: similarities also count in the statistics `others` of the links, at the given scale. ATTRACTION: the
    attraction of a link is -pull times its similarity.
    """
    b, d, v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.program_id(1)
    mask = (b < B)[:, None] & (d < D)[None, :]
    at = (b + v * B).to(tl.int64)[:, None] * D + d[None, :]
    gradient = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    if HAS_UNITS:
        gradient += tl.load(grad_units + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_SIMILARITIES or POSITIVE or ATTRACTION:
        for w in range(W):
            if TEACHER:
                other = view_rows(keys, keys, w, b, B, d, D, False)
            else:
                other = view_rows(z, z2, w, b, B, d, D, PAIRED)
            y, _ = load_rows(other, mask, shortest, NORMALIZE)
            # A view is no pair with itself: any valid index will do, because the weight is masked.
            pair, paired = pair_index(v, w, V, W, TEACHER), b < B
            if not TEACHER:
                pair, paired = tl.where(v == w, 0, pair), (b < B) & (b * 0 + v != w)
            weight = tl.zeros([BLOCK], tl.float32)
            if HAS_SIMILARITIES:
                weight += tl.load(grad_similarities + pair * pair_stride + b * image_stride, mask=paired, other=0.0)
            if POSITIVE or ATTRACTION:
                similarity = tl.load(similarities + pair * B + b, mask=paired, other=0.0)
                weight += link_gradient(
                    similarity, others, grad_others, grad_attraction, link_index(v, w, V, W, LINKS), b, B, scale,
                    pull, paired, others_link, others_image, attraction_link, attraction_image, POSITIVE, ATTRACTION,
                )  # fmt: skip
                if not TEACHER:
                    weight += link_gradient(
                        similarity, others, grad_others, grad_attraction, link_index(w, v, V, W, LINKS), b, B,
                        scale, pull, paired,
                        others_link, others_image, attraction_link, attraction_image, POSITIVE, ATTRACTION,
                    )  # fmt: skip
            gradient += weight[:, None] * y
    if NORMALIZE:
        x, inverse = load_rows(view_rows(z, z2, v, b, B, d, D, PAIRED), mask, shortest, True)
        # A row that was too short to normalize is not a unit vector, and nothing is projected out of its gradient.
        along = tl.where(tl.sum(x * x, 1) < 0.5, 0.0, tl.sum(x * gradient, 1))
        gradient = (gradient - along[:, None] * x) * inverse[:, None]
    tl.store(out + at, gradient.to(out.dtype.element_ty), mask=mask)
