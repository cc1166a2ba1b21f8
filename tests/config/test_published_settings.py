"""The settings that the papers publish: each recipe as it resolves, with the learning rate of its batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kontrast.config.overrides import flat
from kontrast.config.recipe import to_tree
from kontrast.config.recipe_files import recipe_names, resolve
from kontrast.optim.schedules import scaled_learning_rate
from kontrast.runs.cropped_features import CROPS
from kontrast.training.resolve import with_defaults
from kontrast.training.step_schedule import Position, learning_rate_of


@cache
def facts(name: str) -> dict[str, Any]:
    """Return every setting by its path, including default arguments, and the learning rate: `peak` and `last`."""
    recipe = with_defaults(resolve(name))
    t = recipe.training
    rates = {"peak": scaled_learning_rate(t.lr, t.batch, t.lr_scaling)}
    rates["last"] = learning_rate_of(recipe, Position(0, 2000, 1), 2000)
    return flat(to_tree(recipe)) | {key: round(rate, 9) for key, rate in rates.items()}


def table(prefix: str, **values: Any) -> dict[str, Any]:
    return {f"{prefix}.{key}": value for key, value in values.items()}


def training(optimizer: str, peak: float, weight_decay: float, epochs: int, batch: int, **more: Any) -> dict[str, Any]:
    """Return training settings: cosine without warm-up and with momentum 0.9, unless given."""
    plain = {"momentum": 0.9, "schedule": "cosine", "warmup": 0.0, "milestones": [], "lr_per_epoch": False}
    given = {"optimizer": optimizer, "weight_decay": weight_decay, "epochs": epochs, "batch": batch}
    return {"peak": peak, **table("training", **plain, **given) | table("training", **more)}


NEIGHBORS = {"evaluation.k": 200, "evaluation.temperature": 0.1}
ALONE = {"teacher.momentum": None, "bank.size": None, "predictor.name": None}

# CACR's small images: 0.12 B/256, and a tenth of it at each milestone. name: objective, views, batch, peak
STEPS = {"schedule": "steps", "milestones": [155.0, 170.0, 185.0], "gamma": 0.1}
HN = table("objective", name="hard-negative", temperature=0.5, beta=1.0, tau_plus=0.1)
AU = table("objective", name="align-uniform", alpha=2.0, t=2.0, align_weight=1.0, uniform_weight=1.0)
SMALL: dict[str, tuple[dict[str, Any], int, int, float]] = {
    "cl": (table("objective", name="nt-xent", temperature=0.19), 2, 768, 0.36),
    "au-cl": (AU, 2, 768, 0.36),
    "hn-cl": (HN, 2, 768, 0.36),
    "cmc-k4": (table("objective", name="multi-view-nce", temperature=0.19), 5, 128, 0.06),
    "cacr-k1": (table("objective", name="cacr", t_plus=1.0, negatives="cross-view", cost="euclidean"), 2, 768, 0.36),
    "cacr-k4": (table("objective", name="cacr", t_plus=1.0, negatives="cross-view", cost="euclidean"), 5, 128, 0.06),
}
T_MINUS = {
    ("cifar10", "cacr-k1"): 2.0, ("cifar100", "cacr-k1"): 3.0, ("stl10", "cacr-k1"): 3.0,
    ("cifar10", "cacr-k4"): 0.9, ("cifar100", "cacr-k4"): 2.0, ("stl10", "cacr-k4"): 2.0,
}  # fmt: skip
SETS = {"cifar10": ("cacr-cifar", 32, 1.0), "cifar100": ("cacr-cifar100", 32, 1.0), "stl10": ("cacr-stl", 64, 0.9143)}


def small(data: str, method: str) -> dict[str, Any]:
    """Return what CACR's two tables of small images share: the objective and the views."""
    objective, count, _, _ = SMALL[method]
    policy, size, crop = SETS[data]  # of STL-10 the test sees 64 of 70 pixels
    weights = {"objective.t_minus": T_MINUS[data, method]} if method.startswith("cacr") else {}
    joint = {"batch_norm.joint": method == "au-cl"}  # one forward for both views in align-uniform's code
    views = table("views", policy=policy, size=size, count=count) | {"evaluation.crop": crop}
    images = {"data.split": "train+unlabelled" if data == "stl10" else "train"}
    return ALONE | objective | weights | joint | views | images


def alexnet(data: str, method: str) -> dict[str, Any]:
    _, _, batch, peak = SMALL[method]
    network = {"encoder.name": "small-alexnet", "head.name": "fc8", "head.outputs": 128}
    return small(data, method) | network | training("sgd", peak, 1e-4, 200, batch, **STEPS)


def resnet(data: str, method: str) -> dict[str, Any]:
    """Table 9, after the code of HCL."""
    network = table("encoder", name="resnet-50", stem="cifar") | table("head", name="hcl", hidden=512, outputs=128)
    batch = 64 if method.endswith("k4") else 256  # divided by four for four positives
    rest = training("adam", 1e-3, 1e-6, 400, batch, schedule="constant", lr_scaling="none")
    return small(data, method) | network | rest


MOCO = {
    **table("views", policy="moco-v2", count=2, size=224),
    **table("encoder", name="resnet-50", stem="imagenet"),
    **table("head", name="moco-v2", outputs=128),
    **table("teacher", momentum=0.999, schedule="constant", symmetric=False),
    **table("bank", size=65536, contents="last"),
    **table("batch_norm", kind="split", splits=8, joint=True),
    **table("objective", name="info-nce", temperature=0.2),
    **training("sgd", 0.03, 1e-4, 200, 256, lr_per_epoch=True),
    "predictor.name": None,
    "evaluation.crop": 0.875,
}
JCL = {
    **MOCO,
    **table("objective", name="jcl", temperature=0.2, covariance_weight=4.0, ramp=""),
    **{"views.count": 6, "bank.contents": "means", "training.batch": 512, "peak": 0.06},
}
RAMP = {"objective.covariance_weight": 2.0, "objective.ramp": "covariance_weight", "views.count": 5}
ABLATION = {"encoder.name": "resnet-18", "training.epochs": 100, "training.batch": 128, "peak": 0.1}
CACR = {
    **MOCO,
    **table("objective", name="cacr", temperature=None, t_plus=1.0, t_minus=2.0),
    **{"teacher.symmetric": True, "batch_norm.joint": False},
}
DEMO = {  # MoCo's CIFAR demonstration
    **table("objective", name="info-nce", temperature=0.1),
    **table("views", policy="moco-cifar", count=2, size=32),
    **table("encoder", name="resnet-18", stem="cifar"),
    **table("head", name="linear", outputs=128),
    **table("teacher", momentum=0.99, schedule="constant", symmetric=False),
    **table("bank", size=4096, contents="last"),
    **table("batch_norm", kind="split", splits=8),
    **training("sgd", 0.06, 5e-4, 200, 512, lr_per_epoch=True),
}

AFFINITY = table(
    "objective", name="sim-affinity", temperature=0.5, symmetry_weight=0.01, symmetric=False, symmetry_on_scaled=True
)
WHITENING = table("objective", name="sim-whitening", temperature=1.0, symmetry_weight=0.01, variant="paper")  # no tau
TRACE = table("objective", name="sim-trace", variant="auto", scaling="mean")
UNICLR = {"sim-affinity": AFFINITY, "sim-whitening": WHITENING, "sim-trace": TRACE}
UNICLR_CIFAR = {
    **ALONE,
    **table("views", policy="uniclr", count=2, size=32, blur=0.0, local_count=0),
    **table("encoder", name="resnet-18", stem="cifar"),
    **table("head", name="uniclr", hidden=2048, outputs=256),
    **training(
        "sgd", 0.06, 5e-4, 1000, 512, warmup=10.0
    ),  # the warm-up is ours: without it two of three seeds collapsed
}
UNICLR_100 = {
    **ALONE,
    **table("views", policy="uniclr", count=2, size=224, local_count=0),
    **table("encoder", name="resnet-50", stem="imagenet"),
    **table("head", name="uniclr", hidden=2048, outputs=2048),
    **training("lars", 0.1, 1e-6, 200, 512),
    **{"batch_norm.kind": "sync", "evaluation.crop": 0.875},
}
EMA = table("teacher", momentum=0.99, schedule="cosine", symmetric=True)
UNICLR_1K = {  # the row with everything: teacher, predictor, multi-crop
    **UNICLR_100,
    **EMA,
    **table("predictor", name="uniclr", hidden=4096),
    **{"views.local_count": 6, "views.local_size": 96, "training.warmup": 10.0},
}

GCL = {
    **ALONE,
    **table("views", policy="simclr-cifar", count=2, size=32),
    **table("encoder", name="resnet-50", stem="cifar"),
    **table("head", name="simclr", layers=2, outputs=64),
    **training("lars", 0.848528137, 1e-4, 100, 128, warmup=10.0, lr_inside=True),  # 0.075 sqrt(128)
}
GCL_IMAGENET = {
    **GCL,
    **table("views", policy="simclr", count=2, size=224),
    **table("encoder", name="resnet-50", stem="imagenet"),
    **{"head.outputs": 128, "training.batch": 1024, "peak": 2.4, "evaluation.crop": 0.875},  # 0.075 sqrt(1024)
}
NT_XENT = table("objective", name="nt-xent", temperature=0.2, reduction="simclr_tf")  # equation 2 adds both directions
SWD = table("objective", name="swd", distribution_weight=5.0, divisor="mean", loss_scale=1.0)
DECOUPLED = {"temperature": 1.0, "distribution_weight": 0.1, "align_reduction": "mean", "include_self": False}

DCL = {  # batch and epochs are the paper's, the rest is SimCLR's
    **ALONE,
    **table("objective", name="dcl", temperature=0.1, reduction="mean"),
    **table("views", policy="dcl", count=2, size=224),
    **table("encoder", name="resnet-50", stem="imagenet"),
    **table("head", name="simclr", layers=2, outputs=128),
    "evaluation.crop": 0.875,
    **training("lars", 0.3, 1e-6, 200, 256, warmup=10.0, lr_scaling="linear"),
}
RANDBIT = {
    **ALONE,
    **table("objective", name="multi-view-nce", temperature=0.1),
    **table("views", policy="randbit-mnist", count=2, size=28),
    **{"encoder.name": "convn", "encoder.multiplier": 1.0, "head.name": "convn"},
    **training("adam", 1e-3, 2e-4, 10, 1000, schedule="linear"),  # L2 of 1e-4 on w^2 is a decay of 2e-4
}

PER_VIEW = {"batch_norm.kind": "sync", "batch_norm.joint": False}  # MoCo v3 makes a forward for each view
LARC = table("training", optimizer="lars", trust=0.001, adapt_all=True)
QUEUE = table("bank", size=3840, contents="views", start=15.0)
SUPCON = table("objective", name="nt-xent", temperature=0.1) | {"training.labels": True}
RELEASED_CACR = table("objective", name="cacr", variant="mocov3", cost="rbf", t_plus=5.0, t_minus=2.5)
DINO_CROPS = table("views", policy="moco-v3", local_policy="dino-local")
RIVALS: dict[str, dict[str, Any]] = {
    **{f"imagenet/{name}": PER_VIEW for name in ("moco-v3", "moco-v3-vit-small", "moco-v3-vit-base", "cacr-moco-v3")},
    "imagenet100/moco-v3": PER_VIEW | {"objective.temperature": 0.2},
    "imagenet100/cacr-moco-v3": PER_VIEW | RELEASED_CACR | {"views.size": 224, "views.local_count": 8},
    "cifar10/byol": {"batch_norm.joint": False},
    **{f"{data}/supcon": SUPCON for data in ("cifar100", "imagenet100")},
    "cifar100/moco-v1": table("objective", name="info-nce", temperature=0.07) | {"bank.size": 4096},
    "cifar100/cacr-moco-v3": RELEASED_CACR | {"views.size": 32, "views.local_count": 6},
    "imagenet/dino": {"last": 0.004797188, **DINO_CROPS},
    "imagenet100/dino": {"last": 0.0048, **DINO_CROPS},
    "imagenet/dino-vit-small": {"last": 1e-6, **DINO_CROPS},
    "imagenet/zero-cl": {"peak": 4.8, "training.trust": 0.02, "training.adapt_all": False},
    "imagenet100/zero-cl": {"training.trust": 0.02, "head.name": "expander", "head.outputs": 256},
    "imagenet/swav": {"peak": 4.8, "last": 0.0048, "bank.size": None, **LARC},
    "imagenet/swav-b256": {"peak": 0.6, "last": 0.0006, **QUEUE, **LARC},
    "imagenet100/swav": {**QUEUE, **LARC},
    "imagenet/sogclr": {"peak": 1.2, "training.batch": 256},  # 0.075 sqrt(256)
    "imagenet100/sogclr": {"peak": 1.2, "training.batch": 256},
}

BATCHES = (32, 64, 128, 256, 512, 1024)
PUBLISHED = {
    **{f"{data}/{method}": alexnet(data, method) for data in SETS for method in SMALL},
    **{f"{data}/{method}-resnet-50": resnet(data, method) for data in SETS for method in SMALL},
    "imagenet/moco-v2": MOCO,
    "imagenet/jcl": JCL,
    "imagenet/jcl-code": JCL | RAMP | {"training.batch": 256, "peak": 0.03},
    "imagenet/cacr-k1": CACR,
    "imagenet/cacr-k4": CACR | {"views.count": 5},
    "imagenet100/moco-v2": MOCO | {"training.batch": 128},
    "imagenet100/cacr-k1": CACR | {"training.batch": 128},
    "imagenet100/cacr-k4": CACR | {"training.batch": 128, "views.count": 5},
    "imagenet100/moco-v2-resnet-18": MOCO | ABLATION,
    "imagenet100/jcl-resnet-18": JCL | ABLATION,
    "cifar10/moco-v2": DEMO,
    **{f"{data}/{name}": UNICLR_CIFAR | UNICLR[name] for data in ("cifar10", "cifar100") for name in UNICLR},
    "cifar10/sim-affinity-teacher": UNICLR_CIFAR | EMA | AFFINITY,
    "cifar10/sim-whitening-teacher": UNICLR_CIFAR | EMA | WHITENING | {"objective.temperature": 0.5},  # in table 1
    "cifar10/sim-trace-teacher": UNICLR_CIFAR | EMA | TRACE,
    **{f"imagenet100/{name}": UNICLR_100 | UNICLR[name] for name in UNICLR},
    **{f"imagenet/{name}": UNICLR_1K | UNICLR[name] for name in UNICLR},
    "cifar10/sim-affinity-predictor": UNICLR_CIFAR
    | AFFINITY
    | EMA
    | table("predictor", name="uniclr", hidden=512)
    | table("views", local_count=4, local_size=16),
    "cifar10/gcl-nt-xent": GCL | NT_XENT,
    "imagenet/gcl-nt-xent": GCL_IMAGENET | NT_XENT,
    "imagenet/gcl-decoupled": GCL_IMAGENET
    | table("objective", name="decoupled-nt-xent", loss_scale=1000.0, **DECOUPLED),
    **{f"imagenet/gcl-swd-{p}": GCL_IMAGENET | SWD | {"objective.prior": p} for p in ("normal", "hypercube")},
    "imagenet/gcl-swd-hypersphere": GCL_IMAGENET | SWD | table("objective", prior="hypersphere", loss_scale=1000.0),
    "cifar10/simclr-code": training("lars", 2.0, 1e-4, 1000, 512, warmup=10.0, lr_inside=True)
    | table("objective", name="nt-xent", temperature=0.5, reduction="simclr_tf")
    | table("views", policy="simclr-cifar", count=2, size=32)
    | {"encoder.name": "resnet-18", "encoder.stem": "cifar", "head.layers": 3, "head.outputs": 128},
    "cifar10/gcl-decoupled": GCL | table("objective", name="decoupled-nt-xent", loss_scale=1000.0, **DECOUPLED),
    "cifar10/gcl-swd-normal": GCL | SWD | {"objective.prior": "normal"},
    "cifar10/gcl-swd-hypercube": GCL | SWD | {"objective.prior": "hypercube"},
    "cifar10/gcl-swd-hypersphere": GCL | SWD | table("objective", prior="hypersphere", loss_scale=1000.0),
    "imagenet/dcl": DCL,
    "imagenet/simclr": DCL | {"objective.name": "nt-xent"},
    **{f"cifar10/dcl-b{n}": table("objective", name="dcl", temperature=0.1) for n in BATCHES},
    **{f"cifar10/simclr-b{n}": table("objective", name="nt-xent", temperature=0.1) for n in BATCHES},
    "cifar10/dclw": table("objective", name="dclw", sigma=0.5, detach=True),
    "mnist/randbit": RANDBIT,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_settings_of_its_paper(name):
    found = facts(name)
    expected = {"data.source": name.split("/")[0]} | NEIGHBORS | PUBLISHED[name]
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize("name", RIVALS)
def test_a_recipe_of_another_method_has_the_settings_of_its_code(name):
    found, expected = facts(name), {"data.source": name.split("/")[0]} | RIVALS[name]
    assert {key: found.get(key) for key in expected} == expected


def differing(name: str, base: str) -> dict[str, Any]:
    found, below = facts(name), facts(base)
    return {k: found[k] for k in found if k != "title" and found[k] != below.get(k, ...)}


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.endswith(("-linear", "-exponential"))])
def test_an_imbalanced_recipe_is_its_base_on_other_images(name):
    base, kind = name.rsplit("-", 1)
    assert differing(name, base) == {"data.imbalance": kind}


@pytest.mark.parametrize("name", [n for n in recipe_names() if "-t-plus-" in n or "-t-minus-" in n])
def test_a_recipe_named_after_a_weight_has_it(name):
    base, sign, value = name.replace("-t-", " t_").replace("plus-", "plus ").replace("minus-", "minus ").split()
    found = facts(name)
    assert found[f"objective.{sign}"] == float(value)
    assert differing(name, base).keys() <= {f"objective.{sign}"}


# tables 10 (t_minus of K = 4) and 11 (2.0): attraction, repulsion, t_minus
WEIGHTED = {
    "pos-far-neg-near": ("contrastive", "contrastive", 0.9),
    "pos-near-neg-near": ("reversed", "contrastive", 0.9),
    "pos-far-neg-far": ("contrastive", "reversed", 0.9),
    "pos-near-neg-far": ("reversed", "reversed", 0.9),
    "full": ("contrastive", "contrastive", 2.0),
    "uniform-attraction": ("uniform", "contrastive", 2.0),
    "uniform-repulsion": ("contrastive", "uniform", 2.0),
    "uniform-both": ("uniform", "uniform", 2.0),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_weightings_of_tables_10_and_11(name):
    found = facts(f"cifar10/cacr-{name}")
    keys = ("objective.attraction", "objective.repulsion", "objective.t_minus")
    assert tuple(found[key] for key in keys) == WEIGHTED[name]
    assert differing(f"cifar10/cacr-{name}", "cifar10/cacr-k4").keys() <= set(keys)


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.startswith(("cifar10/dcl-b", "cifar10/simclr-b"))])
def test_a_recipe_named_after_a_batch_size_has_it_and_a_hundred_epochs(name):
    found = facts(name)
    assert (found["training.batch"], found["training.epochs"]) == (int(name.rsplit("b", 1)[1]), 100)


def test_classifiers_are_trained_on_crops_of_a_twelfth_or_more_but_cacrs_on_those_of_its_views():
    names = ["moco", "jcl-imagenet100", "dcl-lars", "uniclr", "uniclr-imagenet", "simclr", "simclr-imagenet", "hcl"]
    assert {"cacr": None, **dict.fromkeys(names, (0.08, 1.0))} == CROPS


@pytest.mark.parametrize("data", ["cifar10", "imagenet"])
def test_momentum_contrast_on_bits_differs_in_the_teacher_and_the_bank_alone(data):
    found = differing(f"{data}/randbit-moco", f"{data}/randbit")
    assert {key.split(".")[0] for key in found} == {"teacher", "bank"}
