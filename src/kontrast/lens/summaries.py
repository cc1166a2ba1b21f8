"""Turn tensors into what a reader sees: numbers for a table, and plots whose titles state what they show.

N images, V views, D width of projections, F width of features, n augmentations of an image.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kontrast.lens import plots
from kontrast.lens.map_2d import map_to_plane
from kontrast.lens.measures import BATCH, T_MINUS, as_views, class_cosines, coupling
from kontrast.lens.normality import normality, random_projections
from kontrast.lens.pair_weights import costs, negative_weights, positive_weights
from kontrast.lens.plots import histogram, number, plot, series
from kontrast.lens.positive_spread import PositiveStatistics
from kontrast.lens.rank import dimension_variance, effective_rank, spectrum_shares
from kontrast.objectives import metrics

DEAD = 1e-4
SHOWN = 12


class Summary(NamedTuple):
    """The answer to one question: entries of the table of numbers, and plots."""

    numbers: list[dict[str, Any]]
    plots: list[dict[str, Any]]


def lens_tree(found: list[Summary], **more: Any) -> dict[str, Any]:
    """Return the content of lens.json."""
    joined = {
        "plots": [p for summary in found for p in summary.plots],
        "numbers": [n for summary in found for n in summary.numbers],
    }
    return {"version": 1, **joined, **more}


def zero_rows(count: int, of: int, first: str) -> Summary:
    """Report rows that are all zeros, which the other numbers don't include."""
    return Summary([number("rows of length zero", count, f"of {of:,}, skipped: no direction; first {first}")], [])


def spread(rows: Tensor, what: str) -> Summary:
    """Summarize alignment, if there are several views, and uniformity (Wang and Isola)."""
    z = as_views(rows)
    found = []
    if len(z) > 1:
        note = f"mean squared distance between two views of an image, {what}; 0: views agree"
        found.append(number("alignment", metrics.alignment(z).item(), note))
    note = f"log of the mean of exp(-2 d\N{SUPERSCRIPT TWO}) over images, {what}; lower: more widely spread"
    return Summary([*found, number("uniformity", metrics.uniformity(z).item(), note)], [])


def entropy(curve: list[tuple[float, float]], maximum: float, what: str, x: str = "epoch") -> Summary:
    """Summarize H(X-|X) over time; curve: pairs (epoch, value); the last value is the number."""
    value = curve[-1][1]
    note = f"of {what}, mini-batches of {round(math.exp(maximum)) + 1}, t\N{SUPERSCRIPT MINUS} = {T_MINUS:g}, in nats"
    found = [
        number("conditional entropy", value, f"{note}; high: many negatives share the push"),
        number("conditional entropy, maximum", maximum, "ln(M - 1): all negatives are pushed equally"),
    ]
    if maximum > 0:
        found.append(number("conditional entropy, share", value / maximum, "of the maximum"))
    if len(curve) < 2:
        return Summary(found, [])
    share = f"{100 * value / maximum:.1f}% of its maximum" if maximum > 0 else f"{value:.3g}"
    title = f"Conditional entropy went from {curve[0][1]:.3g} to {value:.3g} nats, {share}"
    why = (
        f"How many negatives share an anchor's repulsion, {note}. Measured before training and at the saved "
        "checkpoints; metrics.jsonl has the same number for the epochs between. It is also high for a network that "
        "maps all images to one point, so read it together with the effective rank."
    )
    lines = [series("H(X\N{SUPERSCRIPT MINUS}|X)", *map(list, zip(*curve)))]
    name = "Conditional entropy of the negatives"
    drawn = plot(
        "entropy", name, title, why, x, "entropy (nats)", lines, references=[(maximum, "maximum")], x_zero=True
    )
    return Summary(found, [drawn])


def multiplier(z: Tensor, temperature: float, batch: int) -> Summary:
    """Summarize the coupling multiplier q: the share of DCL's gradient that NT-Xent keeps at each anchor."""
    q = coupling(z, temperature, batch)
    size = min(batch, z.shape[1])
    note = (
        f"share of DCL's gradient that NT-Xent would keep, batches of {size}, temperature {temperature:g}; 1: all of it"
    )
    title = f"NT-Xent would keep {100 * q.mean().item():.1f}% of the gradient on average"
    lines = [series("anchors", *histogram(q, span=(0.0, 1.0)))]
    drawn = plot(
        "multiplier", "Coupling multiplier", title, f"The coupling multiplier q of each anchor: {note}.",
        "multiplier q", "share of anchors", lines, kind="bars", percent=True,
    )  # fmt: skip
    return Summary([number("coupling multiplier", q.mean().item(), note)], [drawn])


def dimensions(features: Tensor, what: str = "features") -> Summary:
    """Summarize the effective rank, the spectrum and the variance of each dimension."""
    width = features.shape[1]
    share, variance = spectrum_shares(features), dimension_variance(features).sort(descending=True).values
    rank, dead = effective_rank(features), int((variance <= DEAD * variance.mean()).sum())
    found = [
        number("effective rank", rank, f"of {width} dimensions of the {what}; near 1: collapsed"),
        number("variance in the widest direction", share[0].item(), f"share of the total variance of the {what}"),
        number("dimensions without variance", dead, f"of {width}: less than {DEAD:g} of the mean variance"),
    ]
    ranks = torch.arange(1, width + 1)
    drawn = [
        plot(
            "spectrum", f"Spectrum of the {what}",
            f"The {what} use {rank:.1f} of {width} directions; the widest has {100 * share[0].item():.1f}%",
            "Eigenvalues of the covariance as shares of their sum, largest first.",
            "direction, widest first", "share of variance",
            [series(what, ranks, share.clamp_min(1e-12))], y_log=True, x_zero=True, x_whole=True,
        ),
        plot(
            "variance", f"Variance of each dimension of the {what}",
            f"{dead} of {width} dimensions have almost no variance",
            f"Variance of each dimension of the {what} over images, largest first.",
            "dimension, largest first", "variance",
            [series(what, ranks, variance)], kind="bars", x_whole=True,
        ),
    ]  # fmt: skip
    return Summary(found, drawn)


def positives(found: PositiveStatistics, augmentations: int, width: int) -> Summary:
    """Summarize cosines and variance of the views of each image (JCL, figure 3)."""
    cosine, other, variance = (values.mean().item() for values in found)
    note = f"{augmentations} augmentations per image, features"
    numbers = [
        number("positive cosine", cosine, f"mean over all pairs, including a view with itself (JCL figure 3); {note}"),
        number("positive cosine, different views", other, note),
        number("positive variance x width", variance * width, f"1 minus the positive cosine; {note}"),
    ]
    title = f"Different views of one image have a mean cosine of {other:.3f}"
    drawn = [
        plot(
            "positive-cosine", "Cosine between views of one image", title,
            f"Per image, the mean over all pairs of its views, also a view with itself ({note}). Right: more similar.",
            "mean cosine of an image's views", "share of images",
            [series("images", *histogram(found.cosine))], kind="bars", percent=True,
        ),
        plot(
            "positive-variance", "Variance over views of one image",
            f"Views of one image vary by {variance:.2g} per dimension",
            f"Per image, the variance of its views, averaged over dimensions ({note}). Left: more similar.",
            "mean variance of an image's views", "share of images",
            [series("images", *histogram(found.variance))], kind="bars", percent=True,
        ),
    ]  # fmt: skip
    return Summary(numbers, drawn)


def projections(rows: Tensor, what: str) -> Summary:
    """Compare random orthogonal projections with the normal distribution (GCL, figure 3)."""
    projected = random_projections(rows)
    far = normality(projected)
    distance, kurtosis = far.distance.mean().item(), far.kurtosis.mean().item()
    note = f"mean over {projected.shape[1]} random orthogonal directions, {what}"
    middles, share = histogram(projected, span=(-4.0, 4.0))
    step = (middles[1] - middles[0]).item()
    normal = step * torch.exp(-middles.square() / 2) / math.sqrt(2 * math.pi)
    title = f"Seen from random directions, the {what} are {distance:.3f} from normal (KS distance; 0: normal)"
    drawn = plot(
        "projections", "Random projections", title,
        f"Unit vectors projected on {projected.shape[1]} random orthogonal directions, times the square root of the "
        "width. Vectors spread evenly over the sphere follow the normal curve if the width is large.",
        "projection x \N{SQUARE ROOT}width", "share", [series(what, middles, share), series("normal", middles, normal)],
        percent=True,
    )  # fmt: skip
    numbers = [
        number("KS distance to normal", distance, f"{note}; near 0: spread evenly, if the width is large"),
        number("excess kurtosis", kurtosis, f"{note}; 0: normal in shape"),
    ]
    return Summary(numbers, [drawn])


def classes(rows: Tensor, labels: Tensor) -> Summary:
    """Summarize the mean cosine within a class and between classes."""
    within, between = class_cosines(rows, labels)
    found = [("cosine within a class", within), ("cosine between classes", between)]
    return Summary([number(name, value, "mean over pairs of images") for name, value in found if value == value], [])


def weights(query: Tensor, near: Tensor, far: Tensor, t_plus: float = 1.0) -> Summary:
    """Summarize the weights of one query [D]: of positives `near` [K,D] and negatives `far` [J,D] (CACR, figure 6)."""
    up, down = "t\N{SUPERSCRIPT PLUS SIGN}", "t\N{SUPERSCRIPT MINUS}"
    plus, minus = positive_weights(query, near, t_plus), negative_weights(query, far, T_MINUS)
    half = int((minus.sort(descending=True).values.cumsum(0) < 0.5).sum()) + 1
    numbers = [
        number(
            "largest positive weight",
            plus.max().item(),
            f"{len(plus)} views of one query; {1 / len(plus):.3g} if all are equal",
        ),
        number("negatives with half the weight", half, f"of {len(minus)} negatives of one query"),
    ]
    drawn = [
        plot(
            "positive-weights", "Weights of one query's positives",
            f"The farthest of {len(plus)} views gets {100 * plus.max().item():.1f}% of the pull",
            f"softmax({up} x squared distance), {up} = {t_plus:g} (CACR figure 6).",
            "view", "weight", [series("positives", range(1, len(plus) + 1), plus)],
            kind="bars", x_whole=True, references=[(1 / len(plus), "equal")],
        ),
        plot(
            "negative-weights", "Weights of one query's negatives",
            f"{half} of {len(minus)} negatives get half of the push",
            f"softmax(-{down} x squared distance), {down} = {T_MINUS:g}, hardest first (CACR figure 6).",
            "negative, hardest first", "weight",
            [series("negatives", range(1, len(minus) + 1), minus.sort(descending=True).values)],
            x_zero=True, x_whole=True, references=[(1 / len(minus), "equal")],
        ),
    ]  # fmt: skip
    return Summary(numbers, drawn)


def neighborhood(query: Tensor, near: Tensor, far: Tensor, when: str, place: int, seed: int) -> Summary:
    """Map one query, its positives and its negatives at one time, with the query in the middle (CACR, figure 7)."""
    hard = costs(query, far).argsort()
    spread_out = hard[SHOWN:][:: max(1, (len(hard) - SHOWN) // SHOWN)][:SHOWN]
    rows = torch.nn.functional.normalize(torch.cat([query[None], near, far]).double(), dim=1)
    positions = map_to_plane(rows.float(), seed=seed)
    positions = positions - positions[0]
    others = positions[1 + len(near) :]
    groups = {
        "the query": positions[:1],
        "other views of it": positions[1 : 1 + len(near)][:SHOWN],
        "nearest other images": others[hard[:SHOWN]],
        "some further images": others[spread_out],
    }
    lines = [series(name, *plots.separate_points(points)) for name, points in groups.items() if len(points)]
    closest = costs(query, near).max() < costs(query, far).min()
    views = "all views of the query are" if closest else "not all views of the query are"
    title = f"{when}: {views} closer to it than any of {len(far):,} other images"
    note = f"A map (t-SNE) of {len(rows)} projections around one query (CACR figure 7). The axes have no meaning."
    drawn = plot(
        f"neighborhood-{place}", f"Neighborhood of one query, {when}", title, note, "map", "map", lines, kind="points"
    )
    return Summary([], [drawn])


def mini_batch_of(place: int, count: int) -> list[int]:
    """Return the other images of the mini-batch of image `place`, spread evenly over the set of `count` images."""
    step = max(1, count // BATCH)
    return [i for i in range(place % step, count, step) if i != place]
