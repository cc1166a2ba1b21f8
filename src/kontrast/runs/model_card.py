"""The card of a classifier: a README.md that says what it classifies, how well, and what its input is."""

from __future__ import annotations

import os
from typing import Any

from kontrast.errors import printable
from kontrast.views import Views

MOST_CLASSES = 200
"""The card lists at most so many classes."""


def card(name: str, facts: dict[str, Any], info: dict[str, Any], view: Views, channels: int) -> str:
    """Return the card as Markdown.

    Args:
        name: The name of the classifier's folder.
        facts: The content of classifier.json.
        info: The content of run.json.
        view: How images are prepared.
        channels: How many channels they have.
    """
    how = {"linear": "a linear layer on frozen features", "full": "the whole network was fine-tuned"}[facts["mode"]]
    accuracy, policy = facts["accuracy"], view.policies[0]
    lines = [f"# {plain(name)}", ""]
    lines += [
        f"Classifies images into {len(facts['labels'])} classes. Made by kontrast {plain(info['kontrast'])}: {how}.",
        "",
    ]
    lines += ["## Accuracy", ""]
    if accuracy is None:
        lines += [f"Unknown: {facts['measured']}."]
    else:
        share, low, high = (f"{100 * accuracy[key]:.1f}" for key in ("accuracy", "low", "high"))
        lines += [f"{share}% (95% interval {low} to {high}) over {accuracy['n']:,} images, {facts['measured']}.", ""]
        if "searched" in facts["protocol"] and "cross-validation" in facts["measured"]:
            lines += ["The learning rate was chosen on the same images, so this is slightly optimistic.", ""]
        lines += ["| class | images | accuracy |", "| --- | ---: | ---: |"]
        rows = accuracy["per_class"][:MOST_CLASSES]
        lines += [f"| {plain(row['class'])} | {row['n']:,} | {100 * row['accuracy']:.1f}% |" for row in rows]
    lines += ["", "## Training", ""]
    source = os.path.basename(os.path.normpath(info["data"]["name"]))  # a card is shared: no path of this machine
    lines += [f"- {facts['images']:,} labeled images of {plain(source)}; labels.csv names them."]
    lines += [f"- The encoder was pretrained without labels, in the run {plain(facts['pretrained']['run'])}."]
    settings = {k: v for k, v in facts["protocol"].items() if isinstance(v, int | float | str) and k != "name"}
    lines += [f"- Settings: {', '.join(f'{plain(k)} {plain(v)}' for k, v in settings.items())}."]
    lines += ["", "## Use", "", "```sh", "kontrast predict FOLDER-OF-THIS-FILE IMAGES --out predictions.csv", "```", ""]
    mean, std = (", ".join(f"{number:g}" for number in numbers) for numbers in (policy.mean, policy.std))
    crop = (
        f"the middle {policy.center_fraction:g} of the shorter side is cropped and resized to {view.size} x {view.size}"
    )
    scaled = "divided by 255"
    if policy.low and policy.high:
        ends = "; ".join(f"{low:g} to {high:g}" for low, high in zip(policy.low, policy.high))
        scaled = f"values scaled to 0 to 1 ({ends} of the channels)"
    lines += [f"Input: {channels} channels; {crop}, {scaled} and normalized with mean {mean} and deviation {std}."]
    files = "encoder.safetensors (the network up to the features), classifier.safetensors (`weight` and `bias` of the "
    lines += ["", f"Files: {files}linear layer), classifier.json (the labels in the order of the outputs)."]
    return "\n".join(lines) + "\n"


def plain(value: object) -> str:
    """Return text for Markdown: on one line, without markup that a label or a file name may contain."""
    text = printable(str(value)).encode("utf-8", "backslashreplace").decode()
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#&!" else c for c in text)
