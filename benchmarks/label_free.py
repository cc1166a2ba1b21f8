"""How well do measures without labels pick the best epoch of a run and the best of several recipes?

    python benchmarks/label_free.py --data digits --epochs 16 --runs runs/label-free --out results/label-free.md
    python benchmarks/label_free.py --data cifar10 --epochs 100 --every 5 --runs runs/label-free-cifar10 \
        --out results/label-free-cifar10.md cifar10/simclr cifar10/dcl cifar10/cacr-k4 ...

Each recipe, perhaps with overrides ("quickstart objective.temperature=1"), is trained and evaluated every `--every`
epochs. The table has Spearman's rank correlation of each measure with kNN accuracy, over the epochs of a run (mean over
runs) and over the runs at their last epoch, and how much kNN accuracy is lost by the choice of each measure. The last
columns apply the rule of training.stop="auto" to the logged measures. Finished runs are read, interrupted ones resumed.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path
from statistics import fmean

import kontrast
from kontrast.config.recipe import read_recipe
from kontrast.errors import KontrastError
from kontrast.files import read_json_lines, write_atomic
from kontrast.training.stopping_rule import StoppingRule

RECIPES = (
    "quickstart", "quickstart objective.temperature=0.5", "quickstart objective.temperature=2",
    "quickstart training.lr=0.02", "digits/dcl", "digits/cacr-k4", "digits/byol", "digits/simsiam", "digits/moco-v2",
    "digits/lejepa", "digits/swav", "digits/zero-cl",
)  # fmt: skip
MEASURES = (
    "rankme", "rankme_uncentered", "effective_rank", "alpha_req", "lidar", "lidar_above_noise", "lidar_signal",
    "conditional_entropy",
)  # fmt: skip
"""Larger counts as better, except for alpha_req, whose distance to 1 counts."""


def score(record: dict, measure: str) -> float:
    """Return a measure of one evaluation so that larger is better; NaN if it was not measured."""
    value = record.get(measure, math.nan)
    return -abs(value - 1) if measure == "alpha_req" else value


def spearman(first: list[float], second: list[float]) -> float:
    """Return the rank correlation of the pairs that have both numbers; NaN if one of them does not vary."""
    from scipy.stats import spearmanr

    pairs = [pair for pair in zip(first, second) if not any(map(math.isnan, pair))]
    if len(pairs) < 3 or any(len(set(column)) < 2 for column in zip(*pairs)):
        return math.nan
    return float(spearmanr(*zip(*pairs)).statistic)


def train(recipe: str, given: argparse.Namespace) -> Path:
    """Train a recipe, unless that was done before, and return its folder."""
    name, *overrides = recipe.split()
    out = given.runs / recipe.replace("/", "-").replace(" ", "-")
    settings = dict(pair.split("=", 1) for pair in overrides)
    settings = {key: float(value) if value[0].isdigit() else value for key, value in settings.items()}
    settings |= {"training.epochs": given.epochs, "evaluation.every": given.every, "evaluation.gallery": 0}
    resume = (out / "recipe.toml").is_file()
    if not resume or not kontrast.Run(out).info.get("finished"):
        options = {} if resume else {"recipe": name, **settings}
        kontrast.pretrain(None if resume else given.data, out=out, resume=resume, device=given.device, **options)
    return out


def mean(values: list[float]) -> float:
    good = [value for value in values if not math.isnan(value)]
    return fmean(good) if good else math.nan


def row(measure: str, runs: dict[str, list[dict]]) -> list[str]:
    """Return the cells of one measure."""
    within, lost = [], []
    for records in runs.values():
        scores, knn = [score(one, measure) for one in records], [one["knn"] for one in records]
        within.append(spearman(scores, knn))
        known = [i for i, value in enumerate(scores) if not math.isnan(value)]
        if known:
            lost.append(max(knn) - knn[max(known, key=lambda i: scores[i])])
    last = [records[-1] for records in runs.values()]
    across = spearman([score(one, measure) for one in last], [one["knn"] for one in last])
    known = [one for one in last if not math.isnan(score(one, measure))]
    picked = max(known, key=lambda one: score(one, measure))["knn"] if known else math.nan
    regret = 100 * (max(one["knn"] for one in last) - picked)
    return [measure, f"{mean(within):.2f}", f"{100 * mean(lost):.1f}", f"{across:.2f}", f"{regret:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", help="recipes with overrides; default: those of the embedded digits")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/label-free"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="a Markdown file for the tables")
    given = parser.parse_args()
    runs = {}
    for recipe in given.recipes or RECIPES:
        try:
            records = read_json_lines(train(recipe, given) / "metrics.jsonl")
        except KontrastError as error:
            print(f"{recipe}: {error}", file=sys.stderr)
            continue
        runs[recipe] = [one for one in records if "knn" in one]
    heads = ["measure", "over epochs", "lost, best epoch", "over recipes", "lost, best recipe"]
    lines = [f"`python {shlex.join(sys.argv)}`", "", " | ".join(["", *heads, ""]).strip(), "| --- " * len(heads) + "|"]
    lines += [f"| {' | '.join(row(measure, runs))} |" for measure in MEASURES]
    lines += ["", *stopping_table(runs, given.epochs)]
    print("\n".join(lines))
    if given.out is not None:
        write_atomic(given.out, "\n".join(lines) + "\n")


def stopping_table(runs: dict[str, list[dict]], epochs: int) -> list[str]:
    """Return a table of when training.stop="auto" would have ended each run, and at what cost in kNN."""
    lines = [
        "| recipe | kNN, last epoch | stops at epoch | kNN there | alarms |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    tree = {"training": {"stop": "auto", "epochs": epochs}, "evaluation": {"every": 1}}
    for recipe, records in runs.items():
        rule, alarms, stop = StoppingRule(read_recipe(tree), epochs), 0, None
        for record in records:
            alarms += bool(rule.add(record["epoch"], record))
            if rule.flat:
                stop = record
                break
        where = ["", ""] if stop is None else [f"{stop['epoch']:g} of {epochs}", f"{100 * stop['knn']:.1f}"]
        lines.append(f"| {recipe} | {100 * records[-1]['knn']:.1f} | {' | '.join(where)} | {alarms} |")
    return lines


if __name__ == "__main__":
    main()
