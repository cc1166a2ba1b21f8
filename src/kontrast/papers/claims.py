"""Judges the papers' claims by the numbers in results/ and writes docs/results.md.

A check compares sums of cells, such as "dcl-b32 - simclr-b32 > dcl-b512 - simclr-b512". Its margin is the difference
between the two sides, with a 95% interval. If all cells have the same seeds, which share initial weights, image order
and views, the interval is that of the differences per seed. Otherwise it follows from the variances of the cells: over
seeds if a cell has several, and over its test images if not.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kontrast.config.recipe import parse_toml
from kontrast.config.recipe_files import recipe_text
from kontrast.files import write_atomic
from kontrast.papers.highlights import highlights_table
from kontrast.papers.measure import IMAGES
from kontrast.papers.paper_items import papers_page
from kontrast.papers.result_pages import make_pages, markdown_row, write_pages
from kontrast.papers.results_file import find_entry, finished_runs, metric_values, read_results
from kontrast.papers.tables import CLAIMS, Table, load_table, table_names
from kontrast.probes.intervals import over_seeds

HOLDS, FAILS, INCONCLUSIVE, NOT_RUN = "holds", "does not hold", "inconclusive", "not run yet"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper and the checks that decide it."""

    paper: str
    text: str
    table: str
    checks: tuple[str, ...]
    metric: str = ""  # empty: the table's first probe
    note: str = ""


@dataclass(frozen=True)
class Mean:
    """A cell's mean, the variance of the mean (None if unknown), and the values by seed."""

    value: float
    variance: float | None
    by_seed: dict[int, float]


@dataclass(frozen=True)
class Judgment:
    """A verdict and the comparisons that led to it."""

    verdict: str
    details: str


def load_claims() -> list[Claim]:
    tree = parse_toml(recipe_text(CLAIMS), CLAIMS.name)
    return [Claim(**{**claim, "checks": tuple(claim["checks"])}) for claim in tree["claims"]]


def parse_check(check: str) -> list[tuple[dict[str, float], str]]:
    """Parse `a > b > c` into the differences a - b and b - c, which must be positive.

    A difference is a sum {cell: factor}, with constants under "", and the text of its comparison.
    """
    parts = re.split(r" ([<>]) ", check)
    assert len(parts) >= 3, check
    made = []
    for left, sign, right in zip(parts[0::2], parts[1::2], parts[2::2]):
        high, low = (left, right) if sign == ">" else (right, left)
        total = parse_sum(high)
        for cell, factor in parse_sum(low).items():
            total[cell] = total.get(cell, 0.0) - factor
        made.append((total, f"{left} {sign} {right}"))
    return made


def parse_sum(text: str) -> dict[str, float]:
    total: dict[str, float] = {}
    for sign, word in re.findall(r"(?:^|([+-]) )(\S+)", text):
        factor = -1.0 if sign == "-" else 1.0
        number = re.fullmatch(r"\d+(\.\d+)?", word)
        cell, factor = ("", factor * float(word)) if number else (word, factor)
        total[cell] = total.get(cell, 0.0) + factor
    return total


def mean_of(table: Table, tree: dict[str, Any], name: str, metric: str) -> Mean | None:
    """The mean of a cell's finished runs; None if there are none."""
    cell = next(c for c in table.cells if c.name == name)
    runs = finished_runs(find_entry(tree, cell, {}))
    values = {run["seed"]: value for run in runs for value in metric_values([run], metric)}
    if not values:
        return None
    mean = statistics.fmean(values.values())
    if len(values) > 1:
        return Mean(mean, statistics.variance(values.values()) / len(values), values)
    return Mean(mean, variance_over_images(runs[0], metric, mean), values)


def variance_over_images(run: dict[str, Any], metric: str, mean: float) -> float | None:
    """The variance of one run's number over its test images; None if it is unknown.

    The mean of n values between 0 and 1 has a variance of at most mean (1 - mean) / n. For an accuracy it is exactly
    that. The mean of a curve is the mean over images of each image's mean over the curve.
    """
    if metric in run.get("errors", {}):
        return run["errors"][metric] ** 2
    probe = run["probes"].get(metric.removesuffix("_area"))
    images = probe["n"] if probe else {"multiplier": IMAGES}.get(metric)
    return mean * (1 - mean) / images if images else None


def judge(total: dict[str, float], means: dict[str, Mean]) -> tuple[str, float, float | None]:
    """The verdict on `total > 0`, the margin, and half its 95% interval; inconclusive if there is no interval."""
    difference = total.get("", 0.0) + sum(total[cell] * mean.value for cell, mean in means.items())
    half = half_paired_interval(total, means)
    shares = [(total[c] ** 2 * m.variance, len(m.by_seed)) for c, m in means.items() if m.variance is not None]
    if half is None and len(shares) == len(means):
        half = quantile(shares) * math.sqrt(sum(share for share, _ in shares))
    if half is None or abs(difference) <= half:
        return INCONCLUSIVE, difference, half
    return (HOLDS if difference > 0 else FAILS), difference, half


def half_paired_interval(total: dict[str, float], means: dict[str, Mean]) -> float | None:
    """Half the interval of the differences per seed; None for a single seed or if the cells' seeds differ."""
    seeds = {tuple(sorted(mean.by_seed)) for mean in means.values()}
    if len(seeds) != 1:
        return None
    interval = over_seeds([sum(total[cell] * mean.by_seed[s] for cell, mean in means.items()) for s in seeds.pop()])
    return None if interval is None else (interval[1] - interval[0]) / 2


def quantile(shares: list[tuple[float, int]]) -> float:
    """Student's t at 97.5% with Welch's degrees of freedom, which are infinite if all variances are over images."""
    from scipy.stats import t

    over_seeds = sum(share**2 / (seeds - 1) for share, seeds in shares if seeds > 1)
    total = sum(share for share, _ in shares)
    return float(t.ppf(0.975, total**2 / over_seeds)) if over_seeds else 1.959964


def judge_comparison(table: Table, tree: dict[str, Any], check: tuple[dict[str, float], str], metric: str) -> Judgment:
    total, text = check
    means = {name: mean_of(table, tree, name, metric) for name in total if name}
    absent = [name for name, mean in means.items() if mean is None]
    if absent:
        return Judgment(NOT_RUN, f"{text}: {', '.join(absent)} not run")
    known = {name: mean for name, mean in means.items() if mean is not None}
    verdict, difference, half = judge(total, known)
    share = metric in (*table.probes, "knn_area", "linear_area", "added_feature", "top5")
    factor, unit = (100.0, " points") if share else (1.0, "")
    spread = f" ± {factor * half:.2g}" if half is not None else " (no interval)"
    seeds = sorted({len(mean.by_seed) for mean in known.values()})
    count = " to ".join(map(str, seeds[:1] + seeds[-1:] if len(seeds) > 1 else seeds))
    margin = f"margin {factor * difference:+.3g}{spread}{unit} ({count} seed{'s' * (seeds != [1])})"
    return Judgment(verdict, f"{text}: {verdict}, {margin}")


def judge_claim(claim: Claim, table: Table, tree: dict[str, Any]) -> Judgment:
    """A claim fails with any of its comparisons, and holds only if all of them hold."""
    metric = claim.metric or table.main
    judged = [judge_comparison(table, tree, pair, metric) for check in claim.checks for pair in parse_check(check)]
    verdicts = [judgment.verdict for judgment in judged]
    verdict = next((v for v in (FAILS, NOT_RUN, INCONCLUSIVE) if v in verdicts), HOLDS)
    if set(verdicts) == {NOT_RUN}:
        return Judgment(verdict, "")
    return Judgment(verdict, "; ".join(judgment.details for judgment in judged))


def claims_page(out: Path) -> str:
    """The text of docs/results.md for a results folder."""
    claims = load_claims()
    tables = {name: load_table(name) for name in table_names()}
    trees = {name: read_results(out, table) for name, table in tables.items()}
    judged = [(claim, judge_claim(claim, tables[claim.table], trees[claim.table])) for claim in claims]
    count = Counter(judgment.verdict for _, judgment in judged)
    lines = [
        "# What the papers claim, and what we found",
        "",
        "Generated by `kontrast reproduce --docs` from the files in [results/](../results/). Do not edit by hand.",
        "",
        f"Of the {len(judged)} claims that can be checked here, {count[HOLDS]} hold, {count[FAILS]} "
        f"{'does' if count[FAILS] == 1 else 'do'} not hold, {count[INCONCLUSIVE]} are inconclusive, and "
        f"{count[NOT_RUN]} have not been run yet.",
        "",
        "Each claim is decided by one or more comparisons between cells of a table, which are listed in "
        "`src/kontrast/papers/claims.toml`. The margin of a comparison is the difference in the direction of the "
        f"claim, with its 95% interval. A claim *{HOLDS}* if the intervals of all its margins are above zero, and it "
        f"*{FAILS}* if the interval of at least one is below zero. Otherwise it is *{INCONCLUSIVE}*, or *{NOT_RUN}* if "
        "cells are missing.",
        "",
        "If all cells of a comparison have the same two or more seeds, the interval is that of the differences per "
        "seed. Otherwise it follows from the variance of each cell: over seeds if it has several, and over test images "
        "if it has one. An interval over test images says nothing about other seeds.",
        "",
        "## Accuracies",
        "",
        "In percent, after the last epoch. All rows but the last use CIFAR-10 (JPEG). [The papers item by "
        "item](papers.md) has a row for every table and figure.",
        "",
        highlights_table(out),
        "",
    ]
    for paper in dict.fromkeys(claim.paper for claim in claims):
        lines += [f"## {paper}", "", markdown_row(["claim", "verdict", "comparisons", "table"])]
        lines.append(markdown_row(["---"] * 4))
        for claim, judgment in judged:
            if claim.paper == paper:
                where = f"[{claim.table}](../results/{claim.table}.md)"
                text = f"{claim.text} *{claim.note}*" if claim.note else claim.text
                lines.append(markdown_row([text, f"**{judgment.verdict}**", judgment.details, where]))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def write_docs(out: Path, docs: Path) -> list[Path]:
    """Write every table's pages, docs/results.md and docs/papers.md from the JSON files."""
    written: list[Path] = []
    for name in table_names():
        table = load_table(name)
        written += write_pages(out, make_pages(table, read_results(out, table)))
    docs.mkdir(exist_ok=True)
    write_atomic(docs / "results.md", claims_page(out))
    write_atomic(docs / "papers.md", papers_page(out))
    return [*written, docs / "results.md", docs / "papers.md"]
