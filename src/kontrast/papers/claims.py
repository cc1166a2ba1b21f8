"""What the papers claim, judged from results/ by rule: docs/results.md. Nothing here is decided by hand.

A check compares sums of cells: "dcl-b32 - simclr-b32 > dcl-b512 - simclr-b512". Its difference d = left - right has a
95% interval: of the seeds' own differences where all cells have the same seeds, which share weights at the start, order
of images and views; else from the cells' variances, over seeds where a cell has several, else over its test images.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kontrast.config.recipe import parse_toml
from kontrast.config.recipe_files import recipe_text
from kontrast.errors import UsageError
from kontrast.files import write_atomic
from kontrast.papers.measure import IMAGES
from kontrast.papers.result_pages import find, finished, line, pages, stored, values_of, write_pages
from kontrast.papers.tables import CLAIMS, Table, load_table, table_names
from kontrast.probes.intervals import over_seeds
from kontrast.registry import nearest

HOLDS, FAILS, OPEN, NOT_RUN = "holds", "does not hold", "not settled", "not yet run"


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper and the checks that it comes down to."""

    paper: str
    text: str
    table: str
    checks: tuple[str, ...]
    metric: str = ""  # empty: the table's first probe
    note: str = ""


@dataclass(frozen=True)
class Mean:
    """A cell's mean, the variance of that mean (None: not known) and its values by seed."""

    value: float
    variance: float | None
    by_seed: dict[int, float]

    @property
    def seeds(self) -> int:
        return len(self.by_seed)


@dataclass(frozen=True)
class Finding:
    """A check's verdict and the words that show it."""

    verdict: str
    words: str


def load_claims() -> list[Claim]:
    tree = parse_toml(recipe_text(CLAIMS), CLAIMS.name)
    return [Claim(**{**claim, "checks": tuple(claim["checks"])}) for claim in tree["claims"]]


def pairs_of(check: str) -> list[tuple[dict[str, float], str]]:
    """`a > b > c` as the differences a - b and b - c that must be positive: sums {cell: factor}, numbers under ""."""
    parts = re.split(r" ([<>]) ", check)
    if len(parts) < 3:
        raise UsageError(f"check {check!r} must compare: `cell > cell`, with spaces around the sign")
    made = []
    for left, sign, right in zip(parts[0::2], parts[1::2], parts[2::2]):
        high, low = (left, right) if sign == ">" else (right, left)
        total = sum_of(high)
        for cell, factor in sum_of(low).items():
            total[cell] = total.get(cell, 0.0) - factor
        made.append((total, f"{left} {sign} {right}"))
    return made


def sum_of(text: str) -> dict[str, float]:
    total: dict[str, float] = {}
    sign = 1.0
    for word in text.split():
        if word in "+-":
            sign = 1.0 if word == "+" else -1.0
            continue
        number = re.fullmatch(r"\d+(\.\d+)?", word)
        cell, factor = ("", sign * float(word)) if number else (word, sign)
        total[cell] = total.get(cell, 0.0) + factor
    return total


def mean_of(table: Table, tree: dict[str, Any], name: str, metric: str) -> Mean | None:
    """What a cell was measured at; None where it was not."""
    cell = next((c for c in table.cells if c.name == name), None)
    if cell is None:
        raise UsageError(f"{table.name} has no cell {name!r}: {nearest(name, [c.name for c in table.cells])}")
    runs = finished(find(tree, cell, {}))
    values = {run["seed"]: value for run in runs for value in values_of([run], metric)}
    if not values:
        return None
    mean, variance = statistics.fmean(values.values()), None
    if len(values) > 1:
        variance = statistics.variance(values.values()) / len(values)
    else:
        variance = variance_over_images(runs[0], metric, mean)
    return Mean(mean, variance, values)


def variance_over_images(run: dict[str, Any], metric: str, mean: float) -> float | None:
    """The variance of one run's number over its test images; None where it is not known.

    The mean of n values between 0 and 1 has at most the variance mean (1 - mean) / n, and a share of images, a probe's
    accuracy, has just that. A curve's mean is one of each image's mean over the curve.
    """
    if metric in run.get("errors", {}):
        return run["errors"][metric] ** 2
    probe = run["probes"].get("knn" if metric == "knn_area" else metric)
    images = probe["n"] if probe else {"multiplier": IMAGES}.get(metric)
    return mean * (1 - mean) / images if images else None


def judge(total: dict[str, float], means: dict[str, Mean]) -> tuple[str, float, float | None]:
    """The verdict on `total > 0`, the difference, and half its 95% interval; without one nothing is settled."""
    difference = total.get("", 0.0) + sum(total[cell] * mean.value for cell, mean in means.items())
    half = half_of_pairs(total, means)
    shares = [(total[c] ** 2 * m.variance, m.seeds) for c, m in means.items() if m.variance is not None]
    if half is None and len(shares) == len(means):
        half = quantile(shares) * math.sqrt(sum(share for share, _ in shares))
    if half is None or abs(difference) <= half:
        return OPEN, difference, half
    return (HOLDS if difference > 0 else FAILS), difference, half


def half_of_pairs(total: dict[str, float], means: dict[str, Mean]) -> float | None:
    """Half the interval of the seeds' own differences; None where the cells have not the same seeds, or one alone."""
    seeds = {tuple(sorted(mean.by_seed)) for mean in means.values()}
    if len(seeds) != 1:
        return None
    interval = over_seeds([sum(total[cell] * mean.by_seed[s] for cell, mean in means.items()) for s in seeds.pop()])
    return None if interval is None else (interval[1] - interval[0]) / 2


def quantile(shares: list[tuple[float, int]]) -> float:
    """Student's t at 97.5% with Welch's degrees of freedom; over images alone there are as good as infinitely many."""
    from scipy.stats import t

    over_seeds = sum(share**2 / (seeds - 1) for share, seeds in shares if seeds > 1)
    total = sum(share for share, _ in shares)
    return float(t.ppf(0.975, total**2 / over_seeds)) if over_seeds else 1.959964


def check_finding(table: Table, tree: dict[str, Any], check: tuple[dict[str, float], str], metric: str) -> Finding:
    total, words = check
    means = {name: mean_of(table, tree, name, metric) for name in total if name}
    absent = [name for name, mean in means.items() if mean is None]
    if absent:
        return Finding(NOT_RUN, f"{words}: {', '.join(absent)} not run")
    known = {name: mean for name, mean in means.items() if mean is not None}
    verdict, difference, half = judge(total, known)
    factor, unit = (100.0, " points") if metric in (*table.probes, "knn_area") else (1.0, "")
    spread = f" ± {factor * half:.2g}" if half is not None else ", no interval"
    seeds = sorted({mean.seeds for mean in known.values()})
    count = " to ".join(map(str, seeds[:1] + seeds[-1:] if len(seeds) > 1 else seeds))
    return Finding(
        verdict, f"{words}: by {factor * difference:+.3g}{spread}{unit} ({count} seed{'s' * (seeds != [1])})"
    )


def claim_finding(claim: Claim, table: Table, tree: dict[str, Any]) -> Finding:
    """One check that fails decides; then one that was not run; then one within the noise."""
    metric = claim.metric or table.probes[0]
    found = [check_finding(table, tree, pair, metric) for check in claim.checks for pair in pairs_of(check)]
    verdicts = [finding.verdict for finding in found]
    verdict = next((v for v in (FAILS, NOT_RUN, OPEN) if v in verdicts), HOLDS)
    if set(verdicts) == {NOT_RUN}:
        return Finding(verdict, "")
    words = [f.words if f.verdict == NOT_RUN else f"{f.words}: {f.verdict}" for f in found]
    return Finding(verdict, "; ".join(words))


def document(out: Path) -> str:
    """docs/results.md from what the results folder holds."""
    claims = load_claims()
    tables = {name: load_table(name) for name in table_names()}
    trees = {name: stored(out, table) for name, table in tables.items()}
    judged = [(claim, claim_finding(claim, tables[claim.table], trees[claim.table])) for claim in claims]
    counts = [f"{sum(f.verdict == v for _, f in judged)} {w}" for v, w in (
        (HOLDS, "hold"), (FAILS, "do not"), (OPEN, "are not settled"), (NOT_RUN, "are not yet run"))]  # fmt: skip
    lines = [
        "# What the papers claim, and what we found",
        "",
        "Written by `kontrast reproduce --docs` from the files in [results/](../results/); not edited by hand. Of "
        f"{len(judged)} claims that can be checked here, {', '.join(counts[:-1])} and {counts[-1]}.",
        "",
        f"A claim *{HOLDS}* where every comparison it comes down to is decided its way, and *{FAILS}* where one is "
        "decided against it: the 95% interval of the difference leaves zero out. The interval is over the differences "
        "of equal seeds where all cells have the same ones, two or more; else of the cells' own variances, over seeds "
        "where a cell has several, and where it has one over test images alone, which says nothing of other seeds. "
        f"Between the two it is *{OPEN}*. The comparisons are in `src/kontrast/studies/papers/claims.toml`.",
        "",
    ]
    for paper in dict.fromkeys(claim.paper for claim in claims):
        lines += [f"## {paper}", "", line(["claim", "verdict", "comparisons", "table"]), line(["---"] * 4)]
        for claim, finding in judged:
            if claim.paper == paper:
                where = f"[{claim.table}](../results/{claim.table}.md)"
                text = f"{claim.text} *{claim.note}*" if claim.note else claim.text
                lines.append(line([text, f"**{finding.verdict}**", finding.words, where]))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def write_docs(out: Path, docs: Path) -> list[Path]:
    """Write every table's pages and docs/results.md from the JSON files."""
    written: list[Path] = []
    for name in table_names():
        table = load_table(name)
        written += write_pages(out, pages(table, stored(out, table)))
    docs.mkdir(exist_ok=True)
    write_atomic(docs / "results.md", document(out))
    return [*written, docs / "results.md"]
