"""Turn tensors into what a reader sees: numbers for a table, and plots whose titles state what they show.

N images, V views, D width of projections, F width of features, n augmentations of an image.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kontrast.lens import plots
from kontrast.lens.label_free import alpha_req, lidar, rankme
from kontrast.lens.map_2d import map_to_plane
from kontrast.lens.measures import BATCH, T_MINUS, as_views, class_cosines, coupling
from kontrast.lens.normality import normality, random_projections
from kontrast.lens.pair_weights import costs, negative_weights, positive_weights
from kontrast.lens.plots import histogram, series
from kontrast.lens.positive_spread import PositiveStatistics
from kontrast.lens.rank import dimension_variance, effective_rank, spectrum_shares
from kontrast.objectives import metrics

DEAD = 1e-4
SHOWN = 12


class Summary:
    """The content of lens.json, to which each function of this module adds: entries of the table, and plots."""

    def __init__(self) -> None:
        self.numbers: list[dict[str, Any]] = []
        self.plots: list[dict[str, Any]] = []

    def number(self, name: str, value: float, note: str) -> None:
        """Add an entry to the table of numbers."""
        self.numbers.append({"name": name, "value": float(f"{value:.6g}"), "note": note})

    def plot(
        self, *texts: str, lines: list, kind: str = "line", percent: bool = False, references: Any = (), **axes: bool
    ) -> None:
        """Add a plot.

        Args:
            *texts: Its id, name, title and note, and the labels of the axes x and y.
            lines: What `series` returns, for each line.
            kind: "line", "bars" or "points".
            percent: Whether to show the values on the y axis as percentages.
            references: Pairs (value, label) of horizontal lines.
            **axes: The flags `x_zero`, `x_whole`, `y_zero` and `y_log` that the page knows.
        """
        identity, name, title, note, x, y = texts
        x_axis = {"label": x, "zero": axes.get("x_zero", False), "whole": axes.get("x_whole", False)}
        y_axis: dict[str, Any] = {"label": y, "format": "percent" if percent else "number"}
        y_axis |= {"log": axes.get("y_log", False), "zero": axes.get("y_zero", False)}
        about = {"id": identity, "name": name, "title": title, "note": note, "kind": kind, "x": x_axis, "y": y_axis}
        levels = [{"y": float(level), "label": label} for level, label in references]
        self.plots.append({**about, "series": lines, "references": levels})

    def to_dict(self, **more: Any) -> dict[str, Any]:
        return {"version": 1, "plots": self.plots, "numbers": self.numbers, **more}


def spread(summary: Summary, rows: Tensor, what: str) -> None:
    """Summarize alignment, if there are several views, and uniformity (Wang and Isola)."""
    z = as_views(rows)
    if len(z) > 1:
        note = f"mean squared distance between two views of an image, {what}; 0: views agree"
        summary.number("alignment", metrics.alignment(z).item(), note)
    note = f"log of the mean of exp(-2 d\N{SUPERSCRIPT TWO}) over images, {what}; lower: more widely spread"
    summary.number("uniformity", metrics.uniformity(z).item(), note)


def entropy(summary: Summary, curve: list[tuple[float, float]], maximum: float, what: str, x: str = "epoch") -> None:
    """Summarize H(X-|X) over time; curve: pairs (epoch, value); the last value is the number."""
    value = curve[-1][1]
    note = f"of {what}, mini-batches of {round(math.exp(maximum)) + 1}, t\N{SUPERSCRIPT MINUS} = {T_MINUS:g}, in nats"
    summary.number("conditional entropy", value, f"{note}; high: many negatives share the push")
    summary.number("conditional entropy, maximum", maximum, "ln(M - 1): all negatives are pushed equally")
    if maximum > 0:
        summary.number("conditional entropy, share", value / maximum, "of the maximum")
    if len(curve) < 2:
        return
    share = f"{100 * value / maximum:.1f}% of its maximum" if maximum > 0 else f"{value:.3g}"
    summary.plot(
        "entropy", "Conditional entropy of the negatives",
        f"Conditional entropy went from {curve[0][1]:.3g} to {value:.3g} nats, {share}",
        f"How many negatives share an anchor's repulsion, {note}. Measured before training and at the saved "
        "checkpoints; metrics.jsonl has the same number for the epochs between. It is also high for a network that "
        "maps all images to one point, so read it together with the effective rank.",
        x, "entropy (nats)", lines=[series("H(X\N{SUPERSCRIPT MINUS}|X)", *map(list, zip(*curve)))],
        references=[(maximum, "maximum")], x_zero=True,
    )  # fmt: skip


def multiplier(summary: Summary, z: Tensor, temperature: float, batch: int) -> None:
    """Summarize the coupling multiplier q: the share of DCL's gradient that NT-Xent keeps at each anchor."""
    q, size = coupling(z, temperature, batch), min(batch, z.shape[1])
    settings = f"batches of {size}, temperature {temperature:g}"
    note = f"share of DCL's gradient that NT-Xent would keep, {settings}; 1: all of it"
    summary.number("coupling multiplier", q.mean().item(), note)
    summary.plot(
        "multiplier", "Coupling multiplier",
        f"NT-Xent would keep {100 * q.mean().item():.1f}% of the gradient on average",
        f"The coupling multiplier q of each anchor: {note}.", "multiplier q", "share of anchors",
        lines=[series("anchors", *histogram(q, span=(0.0, 1.0)))], kind="bars", percent=True,
    )  # fmt: skip


def dimensions(summary: Summary, features: Tensor, what: str = "features") -> None:
    """Summarize the effective rank, the spectrum and the variance of each dimension."""
    width = features.shape[1]
    share, variance = spectrum_shares(features), dimension_variance(features).sort(descending=True).values
    rank, dead = effective_rank(features), int((variance <= DEAD * variance.mean()).sum())
    summary.number("effective rank", rank, f"of {width} dimensions of the {what}; near 1: collapsed")
    summary.number("variance in the widest direction", share[0].item(), f"share of the total variance of the {what}")
    summary.number("dimensions without variance", dead, f"of {width}: less than {DEAD:g} of the mean variance")
    ranks = torch.arange(1, width + 1)
    summary.plot(
        "spectrum", f"Spectrum of the {what}",
        f"The {what} use {rank:.1f} of {width} directions; the widest has {100 * share[0].item():.1f}%",
        "Eigenvalues of the covariance as shares of their sum, largest first.",
        "direction, widest first", "share of variance",
        lines=[series(what, ranks, share.clamp_min(1e-12))], y_log=True, x_zero=True, x_whole=True,
    )  # fmt: skip
    summary.plot(
        "variance", f"Variance of each dimension of the {what}",
        f"{dead} of {width} dimensions have almost no variance",
        f"Variance of each dimension of the {what} over images, largest first.",
        "dimension, largest first", "variance", lines=[series(what, ranks, variance)], kind="bars", x_whole=True,
    )  # fmt: skip


def label_free(summary: Summary, projections: Tensor, features: Tensor, what: str) -> None:
    """Summarize RankMe of the projections, centered and as in the paper, and alpha-ReQ of the features."""
    width = projections.shape[1]
    note = f"exponential of the entropy of the singular values' shares, of {width} {what}, centered"
    summary.number("RankMe", rankme(projections), f"{note}; also rises with noise")
    summary.number(
        "RankMe, uncentered", rankme(projections, centered=False), "as in the paper: a common offset hides rank"
    )
    exponent = alpha_req(features)
    if not math.isnan(exponent):
        summary.number("alpha-ReQ", exponent, "decay of the features' eigenvalues 12 to 50; near 1 transfers well")


def separability(summary: Summary, z: Tensor, what: str) -> None:
    """Summarize LiDAR of q views of each image [q,N,D], and how far it is from that of noise."""
    found = lidar(z)
    summary.number(
        "LiDAR", found.value, f"of {z.shape[2]}, {z.shape[0]} views of each image, {what}; also large for noise"
    )
    summary.number("LiDAR above noise", found.above_noise, "of the eigenvalues minus those of noise, 1 / views")
    summary.number(
        "LiDAR signal", found.signal, "mean eigenvalue, relative to that of noise; 1: views of an image disagree"
    )


def positives(summary: Summary, found: PositiveStatistics, augmentations: int, width: int) -> None:
    """Summarize cosines and variance of the views of each image (JCL, figure 3)."""
    cosine, other, variance = (values.mean().item() for values in found)
    note = f"{augmentations} augmentations per image, features"
    itself = "mean over all pairs, including a view with itself (JCL figure 3)"
    summary.number("positive cosine", cosine, f"{itself}; {note}")
    summary.number("positive cosine, different views", other, note)
    summary.number("positive variance x width", variance * width, f"1 minus the positive cosine; {note}")
    summary.plot(
        "positive-cosine", "Cosine between views of one image",
        f"Different views of one image have a mean cosine of {other:.3f}",
        f"Per image, the mean over all pairs of its views, also a view with itself ({note}). Right: more similar.",
        "mean cosine of an image's views", "share of images",
        lines=[series("images", *histogram(found.cosine))], kind="bars", percent=True,
    )  # fmt: skip
    summary.plot(
        "positive-variance", "Variance over views of one image",
        f"Views of one image vary by {variance:.2g} per dimension",
        f"Per image, the variance of its views, averaged over dimensions ({note}). Left: more similar.",
        "mean variance of an image's views", "share of images",
        lines=[series("images", *histogram(found.variance))], kind="bars", percent=True,
    )  # fmt: skip


def projections(summary: Summary, rows: Tensor, what: str) -> None:
    """Compare random orthogonal projections with the normal distribution (GCL, figure 3)."""
    projected = random_projections(rows)
    distance, kurtosis = (values.mean().item() for values in normality(projected))
    note = f"mean over {projected.shape[1]} random orthogonal directions, {what}"
    summary.number("KS distance to normal", distance, f"{note}; near 0: spread evenly, if the width is large")
    summary.number("excess kurtosis", kurtosis, f"{note}; 0: normal in shape")
    middles, share = histogram(projected, span=(-4.0, 4.0))
    step = (middles[1] - middles[0]).item()
    normal = step * torch.exp(-middles.square() / 2) / math.sqrt(2 * math.pi)
    summary.plot(
        "projections", "Random projections",
        f"Seen from random directions, the {what} are {distance:.3f} from normal (KS distance; 0: normal)",
        f"Unit vectors projected on {projected.shape[1]} random orthogonal directions, times the square root of the "
        "width. Vectors spread evenly over the sphere follow the normal curve if the width is large.",
        "projection x \N{SQUARE ROOT}width", "share",
        lines=[series(what, middles, share), series("normal", middles, normal)], percent=True,
    )  # fmt: skip


def classes(summary: Summary, rows: Tensor, labels: Tensor) -> None:
    """Summarize the mean cosine within a class and between classes."""
    for name, value in zip(("cosine within a class", "cosine between classes"), class_cosines(rows, labels)):
        if not math.isnan(value):
            summary.number(name, value, "mean over pairs of images")


def weights(summary: Summary, query: Tensor, near: Tensor, far: Tensor, t_plus: float = 1.0) -> None:
    """Summarize the weights of one query [D]: of positives `near` [K,D] and negatives `far` [J,D] (CACR, figure 6)."""
    up, down = "t\N{SUPERSCRIPT PLUS SIGN}", "t\N{SUPERSCRIPT MINUS}"
    plus, minus = positive_weights(query, near, t_plus), negative_weights(query, far, T_MINUS)
    minus, most = minus.sort(descending=True).values, plus.max().item()
    half = int((minus.cumsum(0) < 0.5).sum()) + 1
    equal = f"{len(plus)} views of one query; {1 / len(plus):.3g} if all are equal"
    summary.number("largest positive weight", most, equal)
    summary.number("negatives with half the weight", half, f"of {len(minus)} negatives of one query")
    summary.plot(
        "positive-weights", "Weights of one query's positives",
        f"The farthest of {len(plus)} views gets {100 * most:.1f}% of the pull",
        f"softmax({up} x squared distance), {up} = {t_plus:g} (CACR figure 6).",
        "view", "weight", lines=[series("positives", range(1, len(plus) + 1), plus)],
        kind="bars", x_whole=True, references=[(1 / len(plus), "equal")],
    )  # fmt: skip
    summary.plot(
        "negative-weights", "Weights of one query's negatives",
        f"{half} of {len(minus)} negatives get half of the push",
        f"softmax(-{down} x squared distance), {down} = {T_MINUS:g}, hardest first (CACR figure 6).",
        "negative, hardest first", "weight", lines=[series("negatives", range(1, len(minus) + 1), minus)],
        x_zero=True, x_whole=True, references=[(1 / len(minus), "equal")],
    )  # fmt: skip


def neighborhood(summary: Summary, query: Tensor, near: Tensor, far: Tensor, when: str, place: int, seed: int) -> None:
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
    closest = costs(query, near).max() < costs(query, far).min()
    views = "all views of the query are" if closest else "not all views of the query are"
    summary.plot(
        f"neighborhood-{place}", f"Neighborhood of one query, {when}",
        f"{when}: {views} closer to it than any of {len(far):,} other images",
        f"A map (t-SNE) of {len(rows)} projections around one query (CACR figure 7). The axes have no meaning.",
        "map", "map", kind="points",
        lines=[series(name, *plots.separate_points(points)) for name, points in groups.items() if len(points)],
    )  # fmt: skip


def mini_batch_of(place: int, count: int) -> list[int]:
    """Return the other images of the mini-batch of image `place`, spread evenly over the set of `count` images."""
    step = max(1, count // BATCH)
    return [i for i in range(place % step, count, step) if i != place]
