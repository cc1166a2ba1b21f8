"""Compare ways to choose the images to label: the accuracy of a linear layer that is trained on the chosen ones.

    python benchmarks/few_labels.py RUN --out results/few-labels.md      # a run whose images have labels

For each number of labels, images are chosen at random, by `select_diverse` (k-means, k-center), and half by k-means and
half by k-means among the images that a classifier of the first half is unsure of, as `kontrast select` does. The mean
over seeds is shown with its 95% interval (Student's t).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import kontrast
from kontrast.files import write_atomic
from kontrast.lens.measures import directions
from kontrast.probes import extract_features, linear_layer
from kontrast.probes.intervals import over_seeds
from kontrast.probes.selection import select_diverse
from kontrast.runs.classifier import entropy
from kontrast.runs.select import UNCERTAIN_PER_CHOICE
from kontrast.training.device import choose_device

BUDGETS = (20, 50, 100, 200, 500)


def at_random(rows: Tensor, labels: Tensor, count: int, seed: int) -> Tensor:
    return torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]


def k_means(rows: Tensor, labels: Tensor, count: int, seed: int) -> Tensor:
    return select_diverse(directions(rows), count, seed=seed)


def k_center(rows: Tensor, labels: Tensor, count: int, seed: int) -> Tensor:
    return select_diverse(directions(rows), count, method="k-center", seed=seed)


def then_uncertain(rows: Tensor, labels: Tensor, count: int, seed: int) -> Tensor:
    """Half by k-means; then half among the images that the classifier of the first half is unsure of."""
    first = k_means(rows, labels, count // 2, seed)
    present, y = labels[first].unique(return_inverse=True)
    free = torch.ones(len(rows), dtype=torch.bool).index_fill_(0, first, False).nonzero()[:, 0]
    if len(present) < 2:
        return torch.cat([first, free[k_means(rows[free], labels, count - len(first), seed)]])
    layer, _ = linear_layer(rows[first], y, seed=seed)
    unsure = entropy(layer(rows[free]).softmax(1).detach())
    best = unsure.argsort(descending=True)[: UNCERTAIN_PER_CHOICE * (count - len(first))]
    known = {"weights": unsure[best], "chosen": directions(rows[first]), "seed": seed}
    return torch.cat([first, free[best][select_diverse(directions(rows[free[best]]), count - len(first), **known)]])


WAYS: dict[str, Callable[[Tensor, Tensor, int, int], Tensor]] = {
    "random": at_random, "k-means": k_means, "k-center": k_center, "k-means, then uncertain": then_uncertain,
}  # fmt: skip


def accuracy(train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor, rows: Tensor, seed: int) -> float:
    """Return the test accuracy of a linear layer trained on these rows; a class that is not among them is missed."""
    present, y = labels[rows].unique(return_inverse=True)
    if len(present) < 2:
        return float((test_labels == present[0]).double().mean())
    layer, _ = linear_layer(train[rows], y, seed=seed)
    return float((present[layer(test).argmax(1)] == test_labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run whose images have labels")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    given = parser.parse_args()
    run, device = kontrast.Run(given.run), choose_device(given.device)
    encoder, sets = run.encoder(device), [run.data("train"), run.data("test")]
    train, test = (extract_features(encoder, part, run.transform(), device=device) for part in sets)
    (labels, test_labels) = (part.labels for part in sets)
    lines = [f"Test accuracy in percent of a linear layer on {given.run}, over {given.seeds} seeds.", ""]
    lines += [
        f"`python {shlex.join(sys.argv)}`",
        "",
        "| labels | " + " | ".join(WAYS) + " |",
        "| ---: " * (1 + len(WAYS)) + "|",
    ]
    for count in given.budgets:
        cells = []
        for choose in WAYS.values():
            found = []
            for seed in range(given.seeds):
                rows = choose(train, labels, count, seed)
                found.append(accuracy(train, labels, test, test_labels, rows, seed))
            low, high = over_seeds(found) or (found[0], found[0])
            cells.append(f"{50 * (low + high):.1f} [{100 * low:.1f}, {100 * high:.1f}]")
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    if given.out is not None:
        write_atomic(given.out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
