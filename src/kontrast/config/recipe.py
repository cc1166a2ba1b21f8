"""The recipe: frozen dataclasses, read strictly from TOML. An unknown key is an error that names the nearest known one.

Sections with `arguments` (objective, views, encoder, head, predictor) accept further keys, which are checked when the
named objective or network is built: `objective.temperature`, `encoder.stem`, `views.crop_scale`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kontrast.addresses import bare
from kontrast.config.overrides import DEEPEST
from kontrast.config.suggest import FILLED_IN, nearest_key
from kontrast.config.toml import parse_toml as parse_toml
from kontrast.config.toml import toml_document
from kontrast.config.toml import toml_value as toml_value
from kontrast.errors import UsageError
from kontrast.registry import nearest


@dataclass(frozen=True)
class ObjectiveSettings:
    """The loss, by name, with its arguments."""

    name: str = "nt-xent"
    weight: float = 1.0  # multiplies the loss
    plus: tuple[dict[str, Any], ...] = ()  # further objectives that are added: name, weight, arguments; on="features"
    ramp: str = ""  # an argument that grows linearly to its value, epoch by epoch (JCL's covariance_weight)
    ramp_from: float | None = None  # its value in the first epoch; none: it grows from 0, which no epoch has (JCL)
    ramp_epochs: float = 0.0  # epochs in which it grows; 0: all
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ViewSettings:
    """How each image becomes several augmented views."""

    policy: str = "simclr-cifar"  # a named set of augmentations; its parameters are further keys of [views]
    count: int = 2  # views per image
    size: int = 32  # pixels per side
    local_count: int = 0  # small additional crops per image (multi-crop)
    local_size: int = 0  # pixels per side of a small crop
    local_policy: str = ""  # of the small crops (DINO); empty: that of the views
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkSettings:
    """An encoder, head or predictor, by name, with its arguments."""

    name: str
    lr_factor: float = 1.0  # multiplies the learning rate of this network
    constant_lr: bool = False  # the learning rate of this network stays at its peak (SimSiam's predictor)
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StartSettings:
    """Weights that training starts from, in place of random ones (`--from`)."""

    weights: str = ""  # a run folder, a .safetensors, .pt or .pth file, timm:NAME or hf://OWNER/NAME
    head: bool = False  # start from the run's head, predictor and prototypes too
    frozen_stages: int = 0  # stages of the encoder, from the input, that are not trained


@dataclass(frozen=True)
class DataSettings:
    """Which images are trained on, and how they are read."""

    source: str = "digits"  # the name of a data set, or the path or address of a folder, of shards or of a packed store
    root: str = ""  # the folder of named data sets; empty: KONTRAST_DATA, else ./data
    split: str = "train"  # the split that is trained on; probes always use train and test
    size: int = 0  # larger images are reduced to this shorter side, in pixels; 0: none; not given: what views need
    longest: int = 0  # images that are then longer are reduced to this longer side, in pixels; 0: none
    test_share: float = 0.2  # the share of a labeled folder without a test split that is held out for the probes
    imbalance: Literal["none", "linear", "exponential"] = "none"  # drop images so that classes have unequal sizes
    random_bits: int = 0  # bits per image that are added as constant channels, as features that compete
    overlay_digits: int = 0  # draw one of this many different digits over each image, as features that compete
    captions: str = ""  # auto (as with [text]) or a file of captions beside the images; empty: no captions
    max_bad: float = 0.05  # the share of images that may be unreadable
    float_range: tuple[float, ...] = ()  # the values of float images that are black and white, for example [0, 1]
    depth: Literal["auto", "8-bit", "own"] = "auto"  # own: keep 16 bits, floats and all channels; auto: if all are so
    files: Literal["auto", "pictures", "arrays", "dicom", "video"] = "auto"  # which files of a folder are images
    every: float = 1.0  # seconds between two frames of a video
    layout: Literal["auto", "HWC", "CHW"] = "auto"  # the axes of arrays; auto: the one short axis is the channels
    pages: Literal["first", "channels"] = "first"  # which pages of a TIFF file are read: one, or all as channels
    bands: tuple[int, ...] = ()  # the channels that reports show as red, green and blue, from 1; empty: the first three
    pack: bool = True  # decode large folders once, into a store in the cache
    allow_small: bool = False  # shrink the batch if there are fewer images than one batch
    follow_links: bool = False  # follow symbolic links inside a folder of images
    resident: Literal["auto", "yes", "no"] = "auto"  # keep all images on the device; auto: if they fit

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", bare(self.source))  # recipes and run folders contain no credentials


@dataclass(frozen=True)
class TeacherSettings:
    """A momentum teacher: a moving average of the student that makes the keys."""

    momentum: float = 0.99  # the share of the teacher that each step keeps
    schedule: Literal["constant", "cosine"] = "constant"  # constant, or cosine: the momentum grows to 1 over training
    symmetric: bool = True  # every view is a query and a key; false: view 0 is the query, the others are keys
    result: bool = False  # evaluate and export the teacher's encoder instead of the student's (DINO)


@dataclass(frozen=True)
class BankSettings:
    """A memory bank: keys of earlier batches, which serve as further negatives."""

    size: int = 4096  # rows
    contents: Literal["last", "all", "views", "means", "unit-means"] = "last"  # keys; views: a queue each; means: JCL's
    start: float = 0.0  # epochs before the first rows are stored (SwAV's queue)


@dataclass(frozen=True)
class TextSettings:
    """A text tower: one caption of each image, drawn anew in every step, is a further view of it."""

    name: str = "transformer"  # or hf:FOLDER, a text encoder in the layout of Hugging Face
    tokens: Literal["bytes", "bpe"] = "bytes"  # bpe: learned from the training captions, and kept in vocabulary.json
    vocabulary: int = 4096  # the most tokens of bpe
    length: int = 0  # tokens of a caption that are read; 0: 128 of bytes, 32 of bpe
    head: str = "linear"  # the projection head, as wide as that of the images
    frozen: bool = False  # train the head alone
    lr_factor: float = 1.0  # multiplies the learning rate of the text tower
    templates: str = "photo"  # of zero-shot classification: a named set of templates, or one with {}
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PrototypeSettings:
    """Prototypes: keys that are learned."""

    count: int = 3000
    kind: Literal["unit", "weight-norm"] = "unit"  # unit: weights on the sphere (SwAV); weight-norm: directions (DINO)
    learn_scale: bool = False  # learn the length of each prototype; only for weight-norm
    frozen_epochs: float = 0.0  # epochs at the start in which they are not trained
    frozen_steps: int = 0  # the same in steps; the longer of the two counts
    lr_factor: float = 1.0  # multiplies their learning rate


@dataclass(frozen=True)
class BatchNormSettings:
    """Over which images batch norm computes its statistics."""

    kind: Literal["plain", "split", "sync"] = "plain"  # sync: over all ranks; split: parts with shuffled keys
    splits: int = 8  # parts of the whole batch for kind = "split"; ranks and accumulated parts share them
    joint: bool = True  # one forward for all views, so that statistics are over all of them; false: one per view


@dataclass(frozen=True)
class TrainingSettings:
    """How long and with which optimizer the networks are trained."""

    epochs: int = 20
    batch: int = 256  # images per step, over all ranks
    optimizer: Literal["sgd", "lars", "adamw", "adam"] = "sgd"
    lr: float = 0.06  # the learning rate, before lr_scaling
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"  # none; linear: lr * batch / 256; sqrt: lr * sqrt(batch)
    momentum: float = 0.9  # of sgd and lars
    lr_inside: bool = False  # LARS as in SimCLR's TensorFlow code: the momentum includes the learning rate
    trust: float = 0.001  # LARS: a layer's gradient is scaled to this share of the norm of its weights
    adapt_all: bool = False  # LARS adapts and decays biases and norms too (SwAV); false: they follow plain SGD
    weight_decay: float = 5e-4
    final_weight_decay: float | None = None  # weight decay follows a cosine to this value (DINO); none: it is constant
    decay_all: bool = True  # false: biases and norms have no weight decay
    schedule: Literal["cosine", "steps", "constant", "linear"] = "cosine"  # of the learning rate
    lr_per_epoch: bool = False  # the learning rate changes only between epochs (MoCo, JCL)
    final_lr: float = 0.0  # the learning rate, before lr_scaling, at which cosine and linear schedules end
    warmup: float = 0.0  # epochs in which the learning rate grows linearly from 0
    milestones: tuple[float, ...] = ()  # epochs at which schedule = "steps" multiplies the learning rate by gamma
    gamma: float = 0.1
    clip: float = 0.0  # the largest norm of the gradient; 0: no limit
    clip_each: bool = False  # limit the norm of each parameter's gradient separately (DINO)
    labels: bool = False  # give the labels of the images to the objective (supervised training)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU that has it
    stop_gradient: bool = False  # without a teacher, the student's own projections are keys without gradient (SimSiam)
    accumulate: int = 1  # parts that a batch is computed in, to save memory; the loss is still that of the whole batch
    parallel: Literal["ddp", "fsdp"] = "ddp"  # ddp: a copy per rank; fsdp: sharded parameters, for large ViTs
    compile: Literal["auto", "yes", "no", "blocks"] = "auto"  # the networks; auto: on a GPU; blocks: equal ones once
    deterministic: bool = False  # the same bits each time on a GPU, somewhat slower; a CPU always gives the same bits
    stop: Literal["end", "auto"] = "end"  # auto: end when RankMe, conditional entropy and LiDAR's signal are flat
    max_steps: int = 0  # stop after this many steps if that is before the last epoch; 0: no limit
    log_every: int = 10  # steps between two lines of metrics.jsonl
    track: tuple[str, ...] = ()  # trackers that get every number: tensorboard, wandb, mlflow or your own


@dataclass(frozen=True)
class EvaluationSettings:
    """How the encoder is evaluated during training, and by kNN afterwards."""

    every: int = 0  # epochs between two evaluations by kNN; 0: none
    k: int = 200  # neighbors that vote
    temperature: float = 0.1  # of the votes
    crop: float = 1.0  # side of the center crop that probes see, as a share of the shorter side of the image
    linear: bool = True  # probe by a linear layer after training too, and not only by kNN
    gallery: int = 1000  # images that the gallery of nearest neighbors draws from; 0: no gallery


@dataclass(frozen=True)
class CheckpointSettings:
    """How often checkpoints are written."""

    every: float = 1.0  # epochs between two checkpoints; on a GPU at least 30 seconds pass between them
    keep: int = 2  # how many of the newest are kept, besides the best by kNN


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run trains."""

    title: str = ""
    seed: int = 0
    adapt: bool = False  # choose sizes, batch, epochs and encoder to suit the images and the device
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    views: ViewSettings = field(default_factory=ViewSettings)
    encoder: NetworkSettings = field(default_factory=lambda: NetworkSettings("resnet-18"))
    head: NetworkSettings = field(default_factory=lambda: NetworkSettings("simclr"))
    start: StartSettings | None = None
    predictor: NetworkSettings | None = None
    teacher: TeacherSettings | None = None
    bank: BankSettings | None = None
    prototypes: PrototypeSettings | None = None
    text: TextSettings | None = None
    batch_norm: BatchNormSettings = field(default_factory=BatchNormSettings)
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)


AT_LEAST: dict[str, float] = {
    "views.count": 1, "views.size": 1, "bank.size": 1, "prototypes.count": 2, "batch_norm.splits": 1,
    "training.accumulate": 1, "training.log_every": 1, "evaluation.k": 1, "checkpoints.keep": 1, "training.batch": 2,
    "text.vocabulary": 300, "data.every": 0.001,
    "evaluation.temperature": 1e-6, "evaluation.crop": 1e-3,
}  # fmt: skip
"""The least value of a number; 0 for all others."""
AT_MOST: dict[str, float] = {
    "teacher.momentum": 1, "data.max_bad": 1, "data.test_share": 0.9, "data.random_bits": 62, "evaluation.crop": 1,
    "views.count": 1000, "views.local_count": 1000, "checkpoints.every": 1e9,
}  # fmt: skip


def read_recipe(tree: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """Read a tree of plain values, as TOML gives it, into a checked `Recipe`.

    Args:
        tree: sections and their settings.
        origin: how errors name the recipe.
    """
    recipe = typing.cast(Recipe, _read_section(Recipe, _with_new_names(tree), "", origin))
    if recipe.text is None or recipe.data.captions:
        return recipe
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, captions="auto"))


def _with_new_names(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tree with `training.tensorboard`, as kontrast 0.2 wrote it, as an entry of `training.track`."""
    training = tree.get("training")
    if not isinstance(training, Mapping) or type(training.get("tensorboard")) is not bool:
        return tree
    training = dict(training)
    names = training.get("track", [])
    if training.pop("tensorboard") and isinstance(names, list | tuple) and "tensorboard" not in names:
        training["track"] = [*names, "tensorboard"]
    return {**tree, "training": training}


Settings = typing.TypeVar("Settings")


def read_settings(kind: type[Settings], tree: Mapping[str, Any], origin: str) -> Settings:
    """Read a flat table, as TOML gives it, into a frozen dataclass of another kind than recipes, as strictly."""
    return typing.cast(Settings, _read_section(kind, tree, "", origin))


_types_of = functools.cache(typing.get_type_hints)


def _read_section(kind: type, tree: Mapping[str, Any], path: str, origin: str) -> Any:
    types_of = _types_of(kind)
    values: dict[str, Any] = {"arguments": {}} if "arguments" in types_of else {}
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        if key in types_of and key != "arguments":
            values[key] = _read_value(types_of[key], value, name, origin)
        elif "arguments" in types_of and name not in FILLED_IN:
            values["arguments"][key] = _read_value(None, value, name, origin)
        else:
            known = Recipe if path or kind is Recipe else kind
            unknown = f"unknown key {name!r}: {nearest_key(key, sorted(types_of), known)}"
            filled_in = f"{name} can't be set: it is {FILLED_IN.get(name)}"
            raise UsageError(f"{origin}: {filled_in if name in FILLED_IN else unknown}")
    if kind is NetworkSettings and "name" not in values:
        raise UsageError(f"{origin}: {path} needs a name; it only has {', '.join(values['arguments']) or 'no keys'}")
    return kind(**values)


def _read_value(hint: Any, value: Any, name: str, origin: str) -> Any:
    """Return the value of one setting; `hint` is its type, or None for the argument of an objective or network."""
    if isinstance(hint, types.UnionType):  # an optional section: absent, or `false`
        if value is None or value is False:
            return None
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return _read_section(typing.cast(type, hint), value, name, origin)
    problem = _value_problem(value) or _type_problem(hint, value) or _range_problem(hint, value, name)
    if problem:
        raise UsageError(f"{origin}: {name} {problem}")
    if typing.get_origin(hint) is tuple:
        return tuple(map(ENTRIES[typing.get_args(hint)[0]][0], value))
    return float(value) if hint is float else value


def _value_problem(value: Any, depth: int = 0) -> str:
    """Say why no setting can have this value: NaN, an endless number, a date, deep nesting; "" if one can."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number, not {value}"
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"must be a number below 2^63, not one of {value.bit_length()} bits"
    if isinstance(value, str) and not value.isascii() and value.encode("utf-8", "replace").decode() != value:
        return f"is not UTF-8 text: {value!r}; rename the file or folder"
    if isinstance(value, Mapping | list | tuple):
        if depth == DEEPEST:
            return f"is nested more than {DEEPEST} deep"
        inner = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, (_value_problem(one, depth + 1) for one in inner)), "")
    if not isinstance(value, bool | int | float | str):
        return f"must be a number, text, true or false or a list, not {value!r}"
    return ""


def _is_named_table(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("name"), str)


ENTRIES: dict[Any, tuple[Callable[[Any], Any], Callable[[Any], bool], str]] = {
    float: (float, lambda one: type(one) in (int, float), "numbers"),
    int: (int, lambda one: type(one) is int, "whole numbers"),
    str: (str, lambda one: type(one) is str, 'names, such as ["wandb"]'),
    dict[str, Any]: (dict, _is_named_table, "tables with a name, such as [{ name = 'koleo' }]"),
}
"""How an entry of a list is converted and checked, and what errors call the entries, by the type of the entry."""
TYPE_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def _type_problem(hint: Any, value: Any) -> str:
    """Say why a value is not of a setting's type; "" if it is. A whole number is also a number."""
    if hint is None:
        return ""
    if typing.get_origin(hint) is Literal:
        words = typing.get_args(hint)
        return "" if value in words else f"can't be {value!r}: {nearest(value, words)}"
    if typing.get_origin(hint) is tuple:
        entries = list(value) if isinstance(value, list | tuple) else [None]
        _, is_entry, allowed_entries = ENTRIES[typing.get_args(hint)[0]]
        return "" if all(map(is_entry, entries)) else f"must be a list of {allowed_entries}, not {value!r}"
    allowed = (int, float) if hint is float else (hint,)
    return "" if type(value) in allowed else f"must be {TYPE_NAMES.get(hint, 'a table')}, not {value!r}"


def _range_problem(hint: Any, value: Any, name: str) -> str:
    """Say why a value is outside of what its setting allows; "" if it is not."""
    if hint in (int, float) and value < AT_LEAST.get(name, 0):
        return f"must be at least {AT_LEAST.get(name, 0):g}, not {value}"
    if name in AT_MOST and value > AT_MOST[name]:
        return f"must be at most {AT_MOST[name]:g}, not {value}"
    if name == "text.length" and value in (1, 2):
        return f"must be 0 or at least 3, for a token between a start and an end, not {value}"
    if name == "data.bands" and value and not (len(value) in (1, 3) and min(value) >= 1):
        return f"must be one or three numbers of channels, counted from 1, for example [3,2,1], not {list(value)}"
    if name == "training.milestones" and list(value) != sorted({n for n in value if n >= 0}):
        return f"must be growing numbers of epochs, for example [155, 170], not {value}"
    return ""


def to_tree(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain values: without absent sections, and with arguments beside the name they belong to."""

    def section(items: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(items)
        tree.update(tree.pop("arguments", {}))
        return {k: list(v) if isinstance(v, tuple) else v for k, v in tree.items() if v is not None}

    return dataclasses.asdict(recipe, dict_factory=section)


def to_toml(recipe: Recipe, header: str = "") -> str:
    """Write the recipe as TOML that reads back as the same recipe, with `header` as comments above."""
    return toml_document(to_tree(recipe), header)


def fingerprint(recipe: Recipe) -> str:
    """Return the SHA-256 of the resolved recipe: runs with equal fingerprints have equal settings."""
    return hashlib.sha256(json.dumps(to_tree(recipe), sort_keys=True).encode()).hexdigest()
