"""Turn classifier.json into what the page shows: the accuracy, a confusion matrix and the most uncertain images."""

from __future__ import annotations

from typing import Any

from kontrast.reports.curves import percent
from kontrast.reports.run_files import ReportedRun, is_finite, shorten

MOST_CLASSES = 30
"""Up to so many classes have a matrix; with more, only the most frequent mistakes are listed."""
MISTAKES, UNCERTAIN = 12, 24
HOW = {"linear": "a linear layer on the frozen encoder", "full": "the fine-tuned encoder"}


def drop_damaged_classifier(run: ReportedRun) -> None:
    """Forget the content of classifier.json if it can't be shown, and report that."""
    try:
        classifier_view(run), classifier_verdict(run)
    except (LookupError, TypeError, ValueError, AttributeError):
        run.classifier = {}
        run.problems.append("classifier.json is damaged, so what it would show is missing.")


def classifier_verdict(run: ReportedRun) -> str:
    """Return the first sentences of the page of a classifier; empty for other runs."""
    facts = run.classifier
    if not facts:
        return ""
    trained = f"{HOW[facts['mode']]}, trained on {facts['images']:,} labeled images"
    what = f"Classifier of {len(facts['labels'])} classes, {trained}"
    accuracy = facts["accuracy"]
    if accuracy is None:
        return f"{what}. Its accuracy is unknown: {shorten(facts['measured'])}."
    low, high = percent(accuracy["low"]), percent(accuracy["high"])
    right = f"{percent(accuracy['accuracy'])} (95% interval {low} to {high}) of {accuracy['n']:,} images"
    return f"{what}. It classifies {right} correctly, measured {shorten(facts['measured'])}."


def classifier_view(run: ReportedRun) -> dict[str, Any] | None:
    """Return the confusion matrix, the most frequent mistakes and the most uncertain images; None for other runs."""
    facts = run.classifier
    if not facts:
        return None
    labels = [shorten(label) for label in facts["labels"]]
    counts = {(int(true), int(found)): int(count) for true, found, count in facts["confusion"]}
    if any(not 0 <= number < len(labels) for pair in counts for number in pair):
        raise ValueError("a label that is not listed")
    mistakes = sorted((-count, *pair) for pair, count in counts.items() if pair[0] != pair[1])[:MISTAKES]
    small = bool(counts) and len(labels) <= MOST_CLASSES
    matrix = [[counts.get((i, j), 0) for j in range(len(labels))] for i in range(len(labels))] if small else []
    return {
        "labels": labels,
        "measured": shorten(facts["measured"]),
        "matrix": matrix,
        "mistakes": [[labels[i], labels[j], -count] for count, i, j in mistakes],
        "uncertain": [_uncertain(entry) for entry in facts["uncertain"][:UNCERTAIN]],
    }


def _uncertain(entry: dict[str, Any]) -> dict[str, Any]:
    guesses = [[shorten(label), float(p)] for label, p in entry["guesses"]]
    if not all(is_finite(p) for _, p in guesses):
        raise ValueError("a probability that is not a number")
    return {"file": shorten(entry["file"]), "image": str(entry["image"]), "guesses": guesses}
