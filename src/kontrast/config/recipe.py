"""Recipes: TOML read strictly into frozen dataclasses. An unknown key is an error that names the nearest known one.

Sections with `arguments` (objective, views, encoder, head, predictor) take further keys, which the named thing itself
checks when it is built: `objective.temperature`, `encoder.stem`, `views.crop_scale`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kontrast.config.suggest import FILLED_IN, nearest_key
from kontrast.config.toml import parse_toml as parse_toml
from kontrast.config.toml import toml_document
from kontrast.config.toml import toml_value as toml_value
from kontrast.errors import UsageError
from kontrast.registry import nearest


@dataclass(frozen=True)
class ObjectiveSettings:
    name: str = "nt-xent"
    ramp: str = ""  # the argument that grows linearly from 0 to its value over training (JCL's covariance_weight)
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ViewSettings:
    policy: str = "simclr-cifar"
    count: int = 2
    size: int = 32
    local_count: int = 0
    local_size: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkSettings:
    """An encoder, head or predictor by name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSettings:
    source: str = "digits"
    root: str = ""  # where named sets lie; empty: KONTRAST_DATA, else ./data
    split: str = "train"  # what is trained on; probes read train and test
    size: int = 0  # stored images are bounded by this; 0: as they are
    test_share: float = 0.2  # of a labelled folder without a test part
    imbalance: str = "none"
    random_bits: int = 0
    overlay_digits: int = 0
    max_bad: float = 0.05
    float_range: tuple[float, ...] = ()  # which values of float images are black and white
    pack: bool = True
    allow_small: bool = False
    follow_links: bool = False
    resident: str = "auto"  # images on the device: auto, yes, no


@dataclass(frozen=True)
class TeacherSettings:
    momentum: float = 0.99
    schedule: str = "constant"
    symmetric: bool = True  # every view is query and key; false: view 0 asks, the others answer


@dataclass(frozen=True)
class BankSettings:
    size: int = 4096
    contents: str = "last"  # of the key views: last, all, means (JCL), unit-means


@dataclass(frozen=True)
class BatchNormSettings:
    kind: str = "plain"
    splits: int = 8  # of the whole batch: ranks and accumulated parts share them, so that each has as many images
    joint: bool = True  # one forward for all views, so that statistics are over V x B


@dataclass(frozen=True)
class TrainingSettings:
    epochs: int = 20
    batch: int = 256
    optimizer: str = "sgd"
    lr: float = 0.06
    lr_scaling: str = "none"
    momentum: float = 0.9
    lr_inside: bool = False  # LARS as TensorFlow's SimCLR has it: the rate is inside the momentum
    weight_decay: float = 5e-4
    decay_all: bool = True  # false: biases and norms go without weight decay
    schedule: str = "cosine"
    lr_per_epoch: bool = False  # the schedule stands still within an epoch (MoCo, JCL)
    warmup: float = 0.0
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    precision: str = "auto"
    stop_gradient: bool = False
    accumulate: int = 1
    parallel: str = "ddp"  # on several ranks: ddp (a copy on each), fsdp (parameters in shards, for large ViTs)
    compile: str = "auto"
    deterministic: bool = False  # on a GPU: the same bits each time, somewhat slower; a CPU gives them anyway
    max_steps: int = 0
    log_every: int = 10
    tensorboard: bool = False  # the numbers also as RUN/tensorboard


@dataclass(frozen=True)
class EvaluationSettings:
    every: int = 0  # epochs between online kNN; 0: none
    k: int = 200
    temperature: float = 0.1
    crop: float = 1.0  # side of the centre crop that probes see, over the shorter side of the image
    gallery: int = 1000


@dataclass(frozen=True)
class CheckpointSettings:
    every: float = 1.0  # epochs; on a GPU no sooner than 30 s after the last
    keep: int = 2


@dataclass(frozen=True)
class Recipe:
    title: str = ""
    seed: int = 0
    adapt: bool = False  # choose sizes, batch, epochs and encoder from the images and the device
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    views: ViewSettings = field(default_factory=ViewSettings)
    encoder: NetworkSettings = field(default_factory=lambda: NetworkSettings("resnet-18"))
    head: NetworkSettings = field(default_factory=lambda: NetworkSettings("simclr"))
    predictor: NetworkSettings | None = None
    teacher: TeacherSettings | None = None
    bank: BankSettings | None = None
    batch_norm: BatchNormSettings = field(default_factory=BatchNormSettings)
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)


CHOICES: dict[str, tuple[str, ...]] = {
    "data.imbalance": ("none", "linear", "exponential"),
    "data.resident": ("auto", "yes", "no"),
    "teacher.schedule": ("constant", "cosine"),
    "bank.contents": ("last", "all", "means", "unit-means"),
    "batch_norm.kind": ("plain", "split", "sync"),
    "training.optimizer": ("sgd", "lars", "adamw", "adam"),
    "training.lr_scaling": ("none", "linear", "sqrt"),
    "training.schedule": ("cosine", "steps", "constant", "linear"),
    "training.precision": ("auto", "float32", "bfloat16"),
    "training.compile": ("auto", "yes", "no"),
    "training.parallel": ("ddp", "fsdp"),
}
"""Settings that take one of a few words."""
NOT_NEGATIVE = """
    seed views.local_count views.local_size data.size data.random_bits data.overlay_digits data.max_bad
    data.test_share teacher.momentum training.epochs training.lr training.momentum training.weight_decay
    training.warmup training.gamma training.max_steps evaluation.every evaluation.gallery checkpoints.every
"""
AT_LEAST_ONE = """
    views.count views.size bank.size batch_norm.splits training.accumulate training.log_every evaluation.k
    checkpoints.keep
"""
AT_LEAST: dict[str, float] = {
    **dict.fromkeys(NOT_NEGATIVE.split(), 0),
    **dict.fromkeys(AT_LEAST_ONE.split(), 1),
    "training.batch": 2,
    "evaluation.temperature": 1e-6,
    "evaluation.crop": 1e-3,
}
AT_MOST: dict[str, float] = {
    "teacher.momentum": 1, "data.max_bad": 1, "data.test_share": 0.9, "data.random_bits": 62, "evaluation.crop": 1,
    "views.count": 1000, "views.local_count": 1000, "checkpoints.every": 1e9,
}  # fmt: skip
DEEPEST = 8


def read_recipe(tree: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """A tree of plain values (as TOML gives it) as a checked `Recipe`."""
    return typing.cast(Recipe, _read_section(Recipe, tree, "", origin))


def _read_section(kind: type, tree: Any, path: str, origin: str) -> Any:
    if not isinstance(tree, Mapping):
        raise UsageError(f"{origin}: {path or 'the recipe'} must be a table, not {tree!r}")
    hints = typing.get_type_hints(kind)
    fields = {f.name for f in dataclasses.fields(kind)}
    is_open = "arguments" in fields
    values: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else key
        if key in fields and key != "arguments":
            values[key] = _read_value(hints[key], value, where, origin)
        elif where in FILLED_IN:
            raise UsageError(f"{origin}: {where} can't be set: it is what {FILLED_IN[where]}")
        elif is_open:
            _storable(value, where, origin)
            arguments[key] = value
        else:
            raise UsageError(f"{origin}: unknown key {where!r}: {nearest_key(key, sorted(fields), Recipe)}")
    if is_open:
        values["arguments"] = arguments
    if "name" in fields and kind is NetworkSettings and "name" not in values:
        given = f", and has only {', '.join(arguments)}" if arguments else ""
        raise UsageError(f"{origin}: {path} needs a name{given}")
    return kind(**values)


RISING = ("training.milestones",)
"""Lists of epochs, each later than the one before."""


def _read_value(hint: Any, value: Any, where: str, origin: str) -> Any:
    if isinstance(hint, types.UnionType):  # an optional section: absent, or `false`
        if value is None or value is False:
            return None
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if dataclasses.is_dataclass(hint):
        return _read_section(typing.cast(type, hint), value, where, origin)
    _storable(value, where, origin)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise UsageError(f"{origin}: {where} must be a list of numbers, not {value!r}")
        numbers = tuple(_read_value(float, v, where, origin) for v in value)
        if where in RISING and list(numbers) != sorted({n for n in numbers if n >= 0}):
            raise UsageError(f"{origin}: {where} must be epochs that grow, for example [155, 170], not {value}")
        return numbers
    if type(value) is not hint:
        raise UsageError(f"{origin}: {where} must be {_word(hint)}, not {value!r}")
    _check_range(value, where, origin)
    return value


def _check_range(value: Any, where: str, origin: str) -> None:
    if where in CHOICES and value not in CHOICES[where]:
        raise UsageError(f"{origin}: {where} can't be {value!r}: {nearest(value, CHOICES[where])}")
    if where in AT_LEAST and value < AT_LEAST[where]:
        raise UsageError(f"{origin}: {where} must be at least {AT_LEAST[where]:g}, not {value}")
    if where in AT_MOST and value > AT_MOST[where]:
        raise UsageError(f"{origin}: {where} must be at most {AT_MOST[where]:g}, not {value}")


def _storable(value: Any, where: str, origin: str, depth: int = 0) -> None:
    """Refuse what no setting means: NaN and infinity, endless numbers, dates, deep nests, bytes that are no UTF-8."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{origin}: {where} must be a finite number, not {value}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UsageError(f"{origin}: {where} must be a number below 2^63, not one of {value.bit_length()} bits")
    if isinstance(value, str) and not value.isascii() and value.encode("utf-8", "replace").decode() != value:
        raise UsageError(f"{origin}: {where} is not UTF-8 text: {value!r}; rename the file or folder")
    if isinstance(value, Mapping | list):
        if depth == DEEPEST:
            raise UsageError(f"{origin}: {where} is nested more than {DEEPEST} deep")
        for inner in value.values() if isinstance(value, Mapping) else value:
            _storable(inner, where, origin, depth + 1)
    elif not isinstance(value, bool | int | float | str):
        raise UsageError(f"{origin}: {where} must be a number, text, true or false or a list, not {value!r}")


def _word(hint: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}.get(hint, str(hint))


def to_tree(recipe: Recipe) -> dict[str, Any]:
    """Plain values again; absent sections are left out and open arguments lie beside their name."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            tree = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
            tree.update(tree.pop("arguments", {}))
            return {k: v for k, v in tree.items() if v is not None}
        return list(value) if isinstance(value, tuple) else value

    return typing.cast(dict[str, Any], plain(recipe))


def to_toml(recipe: Recipe, header: str = "") -> str:
    """The recipe as TOML that reads back to the same recipe."""
    return toml_document(to_tree(recipe), header)


def fingerprint(recipe: Recipe) -> str:
    """SHA-256 of the resolved recipe: two runs with one fingerprint ask for the same thing."""
    return hashlib.sha256(json.dumps(to_tree(recipe), sort_keys=True).encode()).hexdigest()
