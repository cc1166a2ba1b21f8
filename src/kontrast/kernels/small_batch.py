"""Small batches on a CUDA device: the row statistics of views in one or two launches each way.

V query views of B images, W key views of N images, D width, S scales, P links.  queries [V,B,D], keys [W,N,D], ids [B]
and [N], similarities [L,B];  statistics [S,P,B], or [P,B] for a single scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kontrast.kernels.custom_gradient import Operation
from kontrast.kernels.dense import affinity, affinity_statistics, in_torch_func
from kontrast.kernels.row_loss import RowLoss
from kontrast.kernels.unit_rows import by_triton, define_unit_rows
from kontrast.kernels.view_links import ALL, cases_of_links, from_one_matrix, image_indices

SMALL = 2**22
"""Up to this many pairs of rows, launches cost more than the arithmetic. `benchmarks/links.py` times both ways."""
WIDEST, MOST_ROWS = 128, {2: 2**10, 4: 2**8}
"""The widest rows, and the most of them by bytes per number, for which a kernel computes s itself; else a matrix
product stores s. In results/races/kernels.json, storing s of width 512 takes less time than computing s of width 256 at
any size, and than computing s of width 64 at 2,048 rows; `benchmarks/small_batches.py` chose the rows of float32."""


def fits_small_kernel(queries: Tensor, keys: Tensor | None) -> bool:
    """Return whether the kernels for small batches can take the views, and are the faster way."""
    rows = queries.shape[0] * queries.shape[1]
    return by_triton(queries) and are_few_pairs(rows, rows if keys is None else keys.shape[0] * keys.shape[1])


def are_few_pairs(rows: int, columns: int) -> bool:
    """Return whether a batch is small, in a program that can call the kernels by themselves."""
    return rows * columns <= SMALL and not torch.compiler.is_compiling() and not in_torch_func()


def is_stored(queries: Tensor) -> bool:
    """Return whether a matrix product computes s; for float32 it is faster than tensor cores on three parts."""
    V, B, D = queries.shape
    rows, most = V * B, MOST_ROWS[queries.element_size()]
    return D > WIDEST or rows > most


class Arguments(NamedTuple):
    """Ids of queries and keys or None, which links, their number, the index of the first query image, scales, options.

    positive: the similarity of the link's two views counts too, as if it were one of the negatives.
    attraction: return -scale times that similarity too.
    single: return statistics without the dimension of the scales.
    """

    query_ids: Tensor | None
    key_ids: Tensor | None
    kind: int
    links: int
    start: int
    scales: list[float]
    detach_weights: bool
    with_mean: bool
    single: bool
    positive: bool = False
    attraction: bool = False


def store_matrix(queries: Tensor, keys: Tensor | None) -> Tensor | None:
    """Return s [V*B,W*N] in float32, or None if the kernel computes it."""
    from kontrast.kernels.triton_wide_launch import exact_products, product

    if not is_stored(queries):
        return None
    others = queries if keys is None else keys
    with exact_products():
        return product(queries.flatten(0, 1), others.flatten(0, 1).T)


def compute_statistics(
    queries: Tensor, keys: Tensor | None, arguments: Arguments, similarities: Tensor | None = None,
    loss: RowLoss | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return lse and mean [S,P,B], the attraction [P,B], HN-CL's slopes, and the stored matrix if there is one.

    With a `loss`, the loss of each row [P,B] takes the place of the attraction.
    """
    from kontrast.kernels.triton_small_launch import triton_views_forward

    query_ids, key_ids, kind, links, start, scales, _, with_mean, *_ = arguments
    matrix = store_matrix(queries, keys)
    statistics = triton_views_forward(
        queries,
        keys,
        query_ids,
        key_ids,
        kind,
        links,
        start,
        scales,
        with_mean,
        similarities,
        arguments.positive,
        matrix,
        loss,
    )
    return *statistics, matrix


def compute_gradients(
    grads: tuple[Tensor | None, Tensor | None], queries: Tensor, keys: Tensor | None,
    lse: Tensor, mean: Tensor, matrix: Tensor | None, arguments: Arguments, need_queries: bool, need_keys: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of queries and keys; if the queries are the keys, the first is the whole gradient."""
    from kontrast.kernels import triton_small_launch as launch
    from kontrast.kernels.triton_wide_launch import exact_products

    query_ids, key_ids, kind, _, start, scales, detach_weights, *_ = arguments
    batch = launch.SmallBatch(lse, mean, kind, start, scales, detach_weights)
    matrix = store_matrix(queries, keys) if matrix is None else matrix
    if matrix is None:
        return launch.triton_views_backward(
            *grads, queries, keys, query_ids, key_ids, batch, need_queries, need_keys
        )  # fmt: skip
    others = queries if keys is None else keys
    shape = len(queries), len(others), queries.shape[1], others.shape[1]
    # The gradient of fp16 needs the range of float32.
    dtype = torch.float32 if queries.dtype == torch.float16 else queries.dtype
    key_ids = query_ids if keys is None else key_ids
    p = launch.triton_stored_gradient(*grads, matrix, shape, keys is None, query_ids, key_ids, batch, dtype)
    with exact_products():
        to_queries = (p @ others.flatten(0, 1).to(dtype)).view_as(queries) if need_queries else None
        to_keys = (p.T @ queries.flatten(0, 1).to(dtype)).view_as(others) if need_keys else None
    return tuple(None if x is None else x.to(queries.dtype) for x in (to_queries, to_keys))  # type: ignore[return-value]


def with_scales(arguments: Arguments, *tensors: Tensor | None) -> list[Any]:
    """Return statistics or their gradients [S,P,B]."""
    return [x if x is None or not arguments.single else x[None] for x in tensors]


# Given rows


def small_forward(queries: Tensor, keys: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    """Return lse and mean [S,P,B], or [P,B] of a `single` scale; the mean is empty if it is not wanted."""
    arguments = Arguments(*given)
    lse, mean, *_ = compute_statistics(queries, keys, arguments)
    return (lse.squeeze(0), mean.squeeze(0)) if arguments.single else (lse, mean)


def small_backward(
    grads: list[Tensor | None], outputs: list[Tensor], needs: list[bool],
    queries: Tensor, keys: Tensor | None, *given: Any,
) -> list[Tensor]:  # fmt: skip
    """Return the needed gradients of queries and keys."""
    arguments = Arguments(*given)
    lse, mean, grad_lse, grad_mean = with_scales(arguments, *outputs, grads[0], grads[1])
    incoming = grad_lse, grad_mean if arguments.with_mean else None
    found = compute_gradients(incoming, queries, keys, lse, mean, None, arguments, needs[0], needs[1])
    return [part for part, need in zip(found, needs) if need and part is not None]


def small_definition(queries: Tensor, keys: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    """Return the same from the whole matrix."""
    query_ids, key_ids, kind, _, start, scales, detach_weights, with_mean, single, *_ = Arguments(*given)
    others = queries if keys is None else keys
    (V, B, _), (W, N, _) = queries.shape, others.shape
    if query_ids is None:
        query_ids, key_ids = image_indices(B, start, queries.device), image_indices(N, 0, queries.device)
    key_ids = query_ids if keys is None else key_ids
    assert key_ids is not None
    if kind == ALL:
        s = affinity(queries.flatten(0, 1), others.flatten(0, 1)).view(V, B, W * N)
        excluded = (query_ids[:, None] == key_ids).repeat(1, W)
        lse, mean = affinity_statistics(s, excluded, scales, detach_weights, with_mean)
    else:
        links = cases_of_links(V, W)[kind]
        lse, mean = from_one_matrix(queries, others, links, scales, query_ids, key_ids, detach_weights, with_mean)
    return (lse[0], mean[0]) if single else (lse, mean)


def small_shapes(queries: Tensor, keys: Any, *given: Any) -> tuple[Tensor, Tensor]:
    arguments = Arguments(*given)
    scale = () if arguments.single else (len(arguments.scales),)
    lse = queries.new_empty(*scale, arguments.links, queries.shape[1], dtype=torch.float32)
    return lse, torch.empty_like(lse) if arguments.with_mean else lse.new_empty(*scale, arguments.links, 0)


small_batch = Operation(
    "small_batch_statistics",
    "Tensor queries, Tensor? keys, Tensor? query_ids, Tensor? key_ids, int kind, int links, int start, "
    "float[] scales, bool detach_weights, bool with_mean, bool single",
    2, forward=small_forward, backward=small_backward, definition=small_definition, shapes=small_shapes,
)  # fmt: skip


# Rows that are normalized on the way


class AnchorFunction(torch.autograd.Function):
    """Unit rows, similarities and statistics of z in one autograd function, whose launches are all that the host does.

    The results are the unit rows of z and keys, the similarities, lse, mean and attraction; keys get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, keys: Tensor | None, normalize: bool, arguments: Arguments) -> Any:
        from kontrast.kernels.triton_unit_launch import triton_unit_forward

        z, keys = z.contiguous(), None if keys is None else keys.contiguous()
        units, key_units, similarities = triton_unit_forward(z, keys, normalize)
        wanted = similarities if arguments.positive or arguments.attraction else None
        lse, mean, attraction, _, matrix = compute_statistics(units, key_units, arguments, wanted)
        if key_units is not None:
            ctx.mark_non_differentiable(key_units)
        ctx.normalize, ctx.arguments = normalize, arguments
        ctx.save_for_backward(z, keys, units, key_units, similarities, lse, mean, matrix)
        ctx.set_materialize_grads(False)
        if arguments.single:
            lse, mean = lse.squeeze(0), mean.squeeze(0)
        return units, key_units, similarities, lse, mean, attraction

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        from kontrast.kernels.triton_unit_launch import LinkGradients, triton_unit_backward

        z, keys, units, key_units, similarities, lse, mean, matrix = ctx.saved_tensors
        grad_units, _, grad_similarities, grad_lse, grad_mean, grad_attraction = grads
        arguments = ctx.arguments
        if torch.is_grad_enabled():  # with create_graph: the gradient will be differentiated again
            return differentiable_gradient(ctx, grads), None, None, None
        links = None
        grad_others = grad_lse if arguments.positive else None
        if grad_others is not None or grad_attraction is not None:
            scale = arguments.scales[0]
            links = LinkGradients(similarities, lse[0], grad_others, grad_attraction, scale, scale, arguments.kind)
        incoming = with_scales(arguments, grad_lse, grad_mean if arguments.with_mean else None)
        if any(grad is not None for grad in incoming):
            found, _ = compute_gradients(
                (incoming[0], incoming[1]), units, key_units, lse, mean, matrix, arguments, True, False
            )
            assert found is not None
            grad_units = found if grad_units is None else grad_units + found
        return triton_unit_backward(z, keys, grad_units, grad_similarities, ctx.normalize, links), None, None, None


def differentiable_gradient(ctx: Any, grads: tuple[Tensor | None, ...]) -> Tensor | None:
    """Compute the gradient of z by the definitions, which store the matrix, so that it can be differentiated."""
    z, keys, *_ = ctx.saved_tensors
    arguments = ctx.arguments
    rows = define_unit_rows(z, keys, ctx.normalize)
    lse, mean = small_definition(rows.z, rows.keys, *arguments)
    attraction = None
    if arguments.positive or arguments.attraction:
        attraction = -arguments.scales[0] * link_similarities(rows.similarities, z, keys, arguments)
        lse = torch.logaddexp(lse, -attraction) if arguments.positive else lse
    outputs = rows.z, None, rows.similarities, lse, mean, attraction
    used = [(x, grad) for x, grad in zip(outputs, grads) if x is not None and grad is not None and x.requires_grad]
    if not used:
        return None
    values, incoming = zip(*used)
    return torch.autograd.grad(values, z, incoming, create_graph=True, allow_unused=True)[0]


def link_similarities(similarities: Tensor, z: Tensor, keys: Tensor | None, arguments: Arguments) -> Tensor:
    """Return the similarity of each link's two views [P,B]."""
    V, W = len(z), len(z if keys is None else keys)
    if arguments.kind == ALL:
        return similarities.expand(V, -1)
    pairs = [(v, w) for v in range(V) for w in range(v + 1 if keys is None else 0, W)]
    order = [link if keys is not None else (min(link), max(link)) for link in cases_of_links(V, W)[arguments.kind]]
    return torch.stack([similarities[pairs.index(link)] for link in order])
