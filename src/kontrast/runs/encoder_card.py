"""The card of an encoder: the README.md of an exported model, for people and for the Hugging Face Hub.

It begins with a header in YAML, which the hub reads, and says what the encoder was trained on and how, what its
features can do beside the controls, how to use it, and what it is not for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kontrast.networks.counterparts import Counterpart
from kontrast.probes.intervals import over_seeds, within_one
from kontrast.runs.model_card import plain

FEATURES = {
    "trained": "this encoder", "starting weights": "its starting weights", "untrained": "untrained", "pixels": "pixels",
}  # fmt: skip
UNKNOWN = "unknown"
"""The license that the hub's header names if none was given."""
SETTINGS = ("epochs", "batch", "optimizer", "lr", "weight_decay", "warmup", "schedule", "precision")


@dataclass(frozen=True)
class CardFacts:
    """What a card says.

    Attributes:
        title: its first line; owner/name of a model on the hub, or the name of its folder.
        format: "timm", "torchvision" or "hub".
        license: of the weights.
        place: what `kontrast.load` takes.
        weights: the name of the weights' file.
        equals: the models of timm and torchvision that are equal to the encoder.
        described: the facts of `kontrast.runs.export.describe`.
    """

    title: str
    format: str
    license: str
    place: str
    weights: str
    equals: tuple[Counterpart, ...]
    described: dict[str, Any]


def encoder_card(facts: CardFacts) -> str:
    """Return the card as Markdown."""
    tree = facts.described
    recipe, data = tree["recipe"], tree["data"]
    version = plain(tree["versions"].get("kontrast", "?"))
    text = "with" if recipe["training"].get("labels") else "without"
    what = f"An image encoder that kontrast {version} trained {text} labels: {plain(recipe['encoder']['name'])}, "
    parts = [
        header(facts, recipe["objective"]["name"]),
        f"# {plain(facts.title)}",
        f"{what}{tree['width']:,} features of an image of {tree['input']['size']} x {tree['input']['size']} px.",
        "## Use",
        *uses(facts),
        "## Input",
        input_lines(tree),
        "## Data",
        data_line(data),
        "## Training",
        training_lines(tree, recipe, facts.format),
        "## Evaluation",
        evaluation(tree["probes"]),
        "## Intended use and limits",
        LIMITS,
        "## License",
        license_line(facts.license),
        "## Citation",
        CITATION,
    ]
    return "\n\n".join(parts) + "\n"


def header(facts: CardFacts, objective: str) -> str:
    """Return the header that the hub reads. JSON's strings are also YAML's, so no text can end or extend it."""
    tags = ["self-supervised-learning", "contrastive-learning", objective, *(one.library for one in facts.equals)]
    lines = [
        f"license: {json.dumps(facts.license)}",
        "library_name: kontrast",
        "pipeline_tag: image-feature-extraction",
    ]
    return "\n".join(["---", *lines, "tags:", *(f"- {json.dumps(tag)}" for tag in tags), "---"])


def uses(facts: CardFacts) -> list[str]:
    """Return how to use the weights from kontrast and from the libraries that have an equal model."""
    found = []
    if facts.format == "hub":
        load = f"encoder = kontrast.load({json.dumps(facts.place)})"
        apply = 'features = encoder(encoder.prepare(["photo.jpg"]))  # cropped, resized and normalized as in training'
        found.append(code("import kontrast", "", load, apply))
        found.append(f"From the shell: `kontrast embed {facts.place} PHOTOS --out vectors.npy`.")
    for one in facts.equals:
        if facts.format in ("hub", one.library):
            found.append({"timm": use_timm, "torchvision": use_torchvision}[one.library](one, facts))
    return found


def use_timm(one: Counterpart, facts: CardFacts) -> str:
    """Return how timm makes the equal model: from a folder or the hub, or from a file of weights."""
    given = "".join(f", {key}={value!r}" for key, value in one.arguments.items())
    place, remote = facts.place, facts.place.startswith("hf://")
    if facts.weights != "model.safetensors":
        overlay = f"pretrained_cfg_overlay=dict(file={json.dumps(facts.weights)}, num_classes=0)"
        made = f"timm.create_model({json.dumps(one.name)}, pretrained=True, num_classes=0{given}, {overlay})"
    else:
        source = f"hf-hub:{place.removeprefix('hf://')}" if remote else f"local-dir:{place}"
        made = f"timm.create_model({json.dumps(source)}, pretrained=True)"
    return "With timm:\n\n" + code("import timm", "", f"encoder = {made}.eval()")


def use_torchvision(one: Counterpart, facts: CardFacts) -> str:
    """Return how torchvision's model gets the tensors; it has a classifier, which is replaced by the identity."""
    given = "".join(f", {key}={value!r}" for key, value in one.arguments.items())
    read = f"tensors = load_file({json.dumps(facts.weights)})"
    if facts.format == "hub" and one.name.startswith("vit"):
        return f"With torchvision, as {one.name}: `kontrast export --format torchvision` renames the tensors."
    lines = [
        "import torch", "from safetensors.torch import load_file", "from torchvision.models import get_model", "",
        read, f"encoder = get_model({json.dumps(one.name)}, weights=None{given})",
        f"encoder.load_state_dict(tensors, strict=False)  # all but the classifier, {one.classifier}",
        f'encoder.set_submodule({json.dumps(one.classifier)}, torch.nn.Identity())', "encoder.eval()",
    ]  # fmt: skip
    return "With torchvision:\n\n" + code(*lines)


def code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def input_lines(tree: dict[str, Any]) -> str:
    """Return how an image becomes the encoder's input."""
    given, normal = tree["input"], tree["normalisation"]
    mean, std = (", ".join(f"{number:g}" for number in normal[key]) for key in ("mean", "std"))
    lines = [f"- {given['channels']} channels, {given['layout']}, {given['size']} x {given['size']} px."]
    lines += [f"- {given['read'][0].upper()}{given['read'][1:]}."] if given.get("read") else []
    share = f"{100 * given['center_fraction']:g}%"
    lines += [f"- The middle square is cropped, whose side is {share} of the shorter side of the image."]
    lines += [f"- It is resized to {given['size']} x {given['size']} px, {given['interpolation']} with antialiasing."]
    lines += ["- Its values are divided by 255."]
    return "\n".join([*lines, f"- Normalized with mean {mean} and standard deviation {std}."])


def data_line(data: dict[str, Any]) -> str:
    """Return what the training images were."""
    count, name = data.get("images"), data.get("name", "?")
    images = f"{count:,} images" if isinstance(count, int) else "images"
    skipped = data.get("skipped")
    without = f"; {skipped:,} could not be read and were left out" if isinstance(skipped, int) and skipped else ""
    return f"{images[0].upper()}{images[1:]} of the set '{plain(name)}'{without}."


def training_lines(tree: dict[str, Any], recipe: dict[str, Any], format: str) -> str:
    """Return how the encoder was trained."""
    objective = {k: v for k, v in recipe["objective"].items() if isinstance(v, int | float | str) and k != "name"}
    loss = ", ".join(f"{plain(k)} {plain(v)}" for k, v in objective.items() if v != "")
    settings = ", ".join(f"{key} {plain(recipe['training'][key])}" for key in SETTINGS if key in recipe["training"])
    done, versions = tree["trained"], tree["versions"]
    lines = [f"- Objective: {plain(recipe['objective']['name'])} ({loss})."]
    lines += [f"- Views: {recipe['views']['count']} of the policy {plain(recipe['views']['policy'])}."]
    lines += [f"- Settings: {settings}; seed {recipe['seed']}."]
    if "start" in recipe:
        lines += [f"- Training started from existing weights: {plain(recipe['start'].get('weights', '?'))}."]
    steps = f"{done['steps']:,} steps" if isinstance(done.get("steps"), int) else "steps"
    seconds = f" in {done['seconds']:,.0f} s" if isinstance(done.get("seconds"), int | float) else ""
    used = ", ".join(f"{plain(name)} {plain(version)}" for name, version in versions.items())
    lines += [f"- {steps}{seconds} on {plain(done.get('device', 'an unknown device'))}; {used}."]
    if format == "hub":
        lines += ["- All settings: recipe.toml, which `kontrast pretrain DATA --recipe recipe.toml` trains again."]
    return "\n".join(lines)


def evaluation(probes: list[dict[str, Any]]) -> str:
    """Return the accuracy of each probe with its 95% interval, beside those of the controls."""
    found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for entry in probes:
        if isinstance(entry.get("accuracy"), int | float) and isinstance(entry.get("features"), str):
            protocol = entry["protocol"] if isinstance(entry.get("protocol"), dict) else {}
            key = str(entry.get("probe", "?")), str(protocol.get("data") or "")
            found.setdefault(key, {}).setdefault(entry["features"], []).append(entry)
    if not found:
        return "No probe has measured these features yet: `kontrast probe RUN` does."
    features = [name for name in FEATURES if any(name in by_features for by_features in found.values())]
    lines = [f"| probe | {' | '.join(FEATURES[name] for name in features)} | test images |"]
    lines += ["| --- |" + " ---: |" * (len(features) + 1)]
    for (probe, data), by_features in found.items():
        cells = [accuracy(by_features.get(name, [])) for name in features]
        count = next(iter(by_features.values()))[0].get("n")
        named = f"{plain(probe)} on {plain(data)}" if data else plain(probe)
        lines += [f"| {named} | {' | '.join(cells)} | {f'{count:,}' if isinstance(count, int) else ''} |"]
    intervals = "with 95% intervals over test images, or over seeds if there are several"
    about = f"Accuracy in percent at the last epoch, {intervals}."
    controls = "The other columns are controls: the same probe on the encoder before training, and on raw pixels."
    images = "The test images are of the training set, but were not trained on, unless the row names other data."
    return "\n".join([*lines, "", about, controls, images])


def accuracy(entries: list[dict[str, Any]]) -> str:
    """Return the mean accuracy with its interval: over seeds if there are several, else over test images."""
    if not entries:
        return ""
    values = [float(entry["accuracy"]) for entry in entries]
    span = within_one(over_seeds(values))
    if span is None:
        ends = entries[0].get("low"), entries[0].get("high")
        span = ends if all(isinstance(end, int | float) for end in ends) else None  # type: ignore[assignment]
    interval = f" [{100 * span[0]:.1f}, {100 * span[1]:.1f}]" if span else ""
    return f"{100 * fmean(values):.1f}{interval}"


def license_line(license: str) -> str:
    if license == UNKNOWN:
        return "None was given, so nothing is granted. The license of kontrast's code does not cover weights."
    return f"{license}, for the weights. Whoever published them has to hold the rights that this grants."


LIMITS = """\
The features are meant for images like those of the training data: search by similarity, grouping, finding duplicates,
and classifiers or detectors that are trained on them with few labels.

- Images of another kind may have features that mean little. Measure on your own images first: `kontrast probe`.
- Whatever is frequent or missing in the training images also shapes the features. Nobody has measured whether they are
  fair to groups of people, and they must not decide about people.
- The accuracies hold for the test images that are named, and not for others."""
CITATION = """\
Cite kontrast with its version, and the paper of the objective: `kontrast explain OBJECTIVE` names it.

```bibtex
@software{kontrast,
  title  = {kontrast: representations without labels, by contrast},
  author = {{The kontrast authors}},
  year   = {2026},
}
```"""
