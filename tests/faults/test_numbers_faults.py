"""Too few images, identical images, extreme temperatures and learning rates: a clear end, never a silent NaN."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

from kontrast.files import read_json_lines
from kontrast.objectives import OBJECTIVES, objective

from support.command_line import kontrast, one_line
from support.made_images import QUICK, folder_of
from support.objective_inputs import extra_inputs, small_objective

NAMES = sorted(OBJECTIVES)
TEMPERED = [name for name in NAMES if "temperature" in OBJECTIVES.arguments(name)]


def pretrain(root, out, *more: str, quick: list[str] = QUICK):
    return kontrast("pretrain", str(root), *quick, *more, "--no-probes", "--device", "cpu", "--out", str(out))


def same_pictures(root, count: int, color: int | None = None):
    """Write copies of one image, or of one plain color."""
    root.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    for number in range(count):
        Image.fromarray(pixels if color is None else np.full_like(pixels, color)).save(root / f"{number:03d}.png")
    return root


def losses(run) -> list[float]:
    return [line["loss"] for line in read_json_lines(run / "metrics.jsonl") if "loss" in line]


@pytest.mark.fault(19)
@pytest.mark.parametrize(
    ("count", "more", "words"),
    [
        (0, [], ["pictures"]),
        (1, ["training.batch=2"], ["1 image", "at least 2"]),
        (1, ["training.batch=2", "data.allow_small=true"], ["1 image", "at least 2"]),
        (10, ["training.batch=16"], ["10 images", "16", "data.allow_small=true"]),
        (15, ["training.batch=100000"], ["15 images", "100000"]),
    ],
)
def test_too_few_images(tmp_path, count, more, words):
    """Exit 3 with both counts and what to do; there is no run folder."""
    (tmp_path / "pictures").mkdir()
    root = folder_of(tmp_path / "pictures", count)
    one_line(pretrain(root, tmp_path / "run", *more), 3, *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(19)
def test_small_data_with_allow_small(tmp_path):
    """Two images train; a batch larger than the data shrinks if that is allowed, with a message."""
    root = folder_of(tmp_path / "two", 2)
    done = pretrain(root, tmp_path / "a", "training.batch=2")
    assert done.returncode == 0 and all(map(math.isfinite, losses(tmp_path / "a"))), done.stderr
    done = pretrain(root, tmp_path / "b", "training.batch=512", "data.allow_small=true")
    assert done.returncode == 0 and re.search(r"512\b.*\b2\b", done.stderr), done.stderr


@pytest.mark.fault(20)
@pytest.mark.parametrize("color", [None, 0, 255], ids=["one-picture", "black", "white"])
def test_identical_images_collapse(tmp_path, color):
    """Training ends with finite losses; log and report say `collapsed` with effective rank 1.0."""
    root = same_pictures(tmp_path / "pictures", 40, color)
    argv = ["views.crop_scale=[1,1]", "views.jitter=[0,0,0,0]", "views.gray=0"] if color is None else []
    done = pretrain(root, tmp_path / "run", *argv)
    assert done.returncode == 0 and re.search(r"collapsed.*rank 1\.0", done.stderr), done.stderr
    assert losses(tmp_path / "run") and all(map(math.isfinite, losses(tmp_path / "run")))
    assert kontrast("report", str(tmp_path / "run")).returncode == 0
    assert re.search(r"collapsed.*rank 1\.0", (tmp_path / "run" / "report.html").read_text())


NEEDED = {
    "multi-view-nce": ["views.count=3"],
    "swav": ["prototypes.count=8"],
    "dino": ["prototypes.count=8", "prototypes.kind=weight-norm", "teacher.momentum=0.9"],
    "co2": ["bank.size=64", "teacher.momentum=0.9", "teacher.symmetric=false"],
}


@pytest.mark.fault(20)
@pytest.mark.parametrize("name", [name for name in NAMES if not OBJECTIVES[name].needs_labels])
def test_every_objective_on_images_without_variance(tmp_path, name):
    """Steps on plain gray images give finite losses and weights."""
    from safetensors.torch import load_file

    root = same_pictures(tmp_path / "pictures", 32, 128)
    more = ["--recipe", "folder", f"objective.name={name}", "training.max_steps=2"]
    done = pretrain(root, tmp_path / "run", *more, *NEEDED.get(name, ["views.count=2"]))
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 2 and all(map(math.isfinite, losses(tmp_path / "run")))
    assert all(bool(torch.isfinite(t).all()) for t in load_file(tmp_path / "run" / "encoder.safetensors").values())


@pytest.mark.fault(22)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TEMPERED)
def test_any_temperature_gives_the_definitions_value(name, dtype):
    """From 1e-4 to 1e4, also in half precision: finite gradients, and float64's value to the precision of the type."""
    digits = {torch.float32: 3e-7, torch.float16: 2e-4, torch.bfloat16: 1e-3}[dtype]
    z = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    for temperature in (1e-4, 5e-3, 0.01, 0.05, 1.0, 100.0, 1e4):
        loss = small_objective(name, temperature=temperature)
        given = z.clone().requires_grad_()
        value = loss(given, **extra_inputs(name, z))
        exact = loss(z.double(), **extra_inputs(name, z.double()))
        assert bool(torch.isfinite(value)) and bool(torch.isfinite(torch.autograd.grad(value, given)[0]).all())
        # A temperature of 1e-4 magnifies the rounding of a similarity ten thousand times; one of 1e4 that of SogCLR's
        # mean of exponentials, whose log it multiplies.
        magnified = max(1, temperature) if name in ("sogclr", "isogclr") else 1 / temperature
        torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=digits * magnified + 1e-5)


@pytest.mark.fault(22)
@pytest.mark.parametrize("temperature", ["1e-4", "1e4"])
def test_extreme_temperatures_train(tmp_path, temperature):
    """Exit 0 with finite losses at both ends."""
    done = pretrain(folder_of(tmp_path / "p", 40), tmp_path / "run", f"objective.temperature={temperature}")
    assert done.returncode == 0 and all(map(math.isfinite, losses(tmp_path / "run"))), done.stderr


@pytest.mark.fault(23)
@pytest.mark.parametrize(
    "more",
    [
        ["training.batch=1"],
        ["training.batch=0"],
        ["training.batch=16", "training.accumulate=16", "batch_norm.joint=false"],
        ["training.batch=8", "batch_norm.kind=split", "batch_norm.splits=8", "batch_norm.joint=false"],
    ],
)
def test_batch_too_small_for_batch_norm(tmp_path, more):
    """Exit 2 with the smallest batch, before the first step; there is no run folder."""
    done = pretrain(folder_of(tmp_path / "p", 40), tmp_path / "run", *more)
    one_line(done, 2, "at least")
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(21)
@pytest.mark.parametrize("name", ["nt-xent", "cacr", "vicreg", "barlow-twins", "sim-whitening"])
def test_learning_rate_far_too_large(tmp_path, name):
    """The loss stays finite, or exit 5 with step and learning rate; checkpoints are finite either way."""
    from safetensors.torch import load_file

    argv = [f"objective.name={name}", "training.lr=300", "training.warmup=0", "training.max_steps=12"]
    done = pretrain(
        folder_of(tmp_path / "p", 64), tmp_path / "run", *argv, "training.epochs=3", "checkpoints.every=0.25"
    )
    assert done.returncode in (0, 5), done.stderr
    if done.returncode == 5:
        one_line(done, 5, "not finite at step", "training.lr")
    else:
        assert all(map(math.isfinite, losses(tmp_path / "run")))
    for place in (tmp_path / "run" / "checkpoints").glob("step-*/state.safetensors"):
        tensors = load_file(place).values()
        assert all(bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point())


@pytest.mark.fault(21)
def test_learning_rate_that_must_explode(tmp_path):
    """Exit 5 at lr 1e30, and no encoder file."""
    done = pretrain(
        folder_of(tmp_path / "p", 64),
        tmp_path / "run",
        "training.lr=1e30",
        "training.warmup=0",
        "training.max_steps=20",
        "training.epochs=9",
    )
    one_line(done, 5, "not finite at step")
    assert not (tmp_path / "run" / "encoder.safetensors").exists()


@pytest.mark.fault(21)
@pytest.mark.parametrize("rate", ["1e10", "1e308"])
def test_weights_ruined_by_the_last_step(tmp_path, rate):
    """Exit 5, although the last loss was finite: the features are not. 1e308 is also beyond float32."""
    argv = [f"training.lr={rate}", "training.warmup=0", "training.max_steps=1"]
    done = pretrain(folder_of(tmp_path / "p", 64), tmp_path / "run", *argv)
    one_line(done, 5, "not finite", "training.lr")
    assert not (tmp_path / "run" / "encoder.safetensors").exists()


@pytest.mark.fault(19)
def test_no_epochs_give_the_untrained_encoder(tmp_path):
    """Zero epochs are allowed: the run contains the initial encoder and can be probed."""
    from kontrast.runs.run import Run

    done = pretrain(
        folder_of(tmp_path / "p", 30, classes=2), tmp_path / "run", "training.epochs=0", "training.max_steps=0"
    )
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    a, b = run.encoder().state_dict(), run.encoder(trained=False).state_dict()
    assert all(torch.equal(a[k], b[k]) for k in b)
    assert kontrast("probe", str(tmp_path / "run"), "knn", "--device", "cpu").returncode == 0


@pytest.mark.fault(22)
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_beyond_its_range(name):
    """fp16 rows of 60,000, whose products overflow, have float64's loss and a finite gradient."""
    z = torch.randn(2, 10, 6, generator=torch.Generator().manual_seed(1))
    z = (z / z.abs().max() * 60_000).half()
    given = z.clone().requires_grad_()
    loss = small_objective(name, z)
    if not loss.normalize and name not in ("w-mse", "sim-trace"):
        pytest.skip("not normalised: its value is of the order of 1e9 by definition")
    value, exact = (loss(x, **extra_inputs(name, x.detach())) for x in (given, z.double()))
    torch.testing.assert_close(value.double(), exact, rtol=1e-3, atol=1e-3)
    assert bool(torch.isfinite(torch.autograd.grad(value, given)[0]).all())


@pytest.mark.fault(22)
@pytest.mark.parametrize("name", NAMES)
def test_strides_do_not_matter(name):
    """Transposed, sliced, expanded and flipped tensors give the values and gradients of contiguous ones."""
    base = torch.randn(6, 20, 2, generator=torch.Generator().manual_seed(2))
    layouts = [
        base.permute(2, 1, 0)[:, ::2],
        torch.randn(20, 2, 12, generator=torch.Generator().manual_seed(3))[::2, :, ::2].transpose(0, 1),
    ]
    layouts.append(layouts[0].flip(1))
    loss, more = small_objective(name, layouts[0]), extra_inputs(name, layouts[0])
    for strided in layouts:
        plain = strided.contiguous().clone().requires_grad_()
        odd = strided.detach().requires_grad_()
        assert not strided.is_contiguous() or strided is layouts[2]
        a, b = loss(plain, **more), loss(odd, **more)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            torch.autograd.grad(a, plain)[0], torch.autograd.grad(b, odd)[0], rtol=1e-5, atol=1e-6
        )


@pytest.mark.fault(22)
def test_channels_last_images():
    """Channels-last or strided images give the same views, bit for bit, and the same features."""
    from kontrast import networks
    from kontrast.views import Views, keys

    images = torch.randint(0, 256, (6, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    wide = torch.zeros(6, 3, 40, 40, dtype=torch.uint8)
    wide[..., ::2, ::2] = images
    views, key = Views("simclr-cifar", count=2, size=16), keys(0, 0, torch.arange(6))
    plain = views(images, key)
    for other in (images.contiguous(memory_format=torch.channels_last), wide[..., ::2, ::2]):
        assert torch.equal(views(other, key), plain)
    encoder = networks.encoder("small-conv", size=16, width=16).eval()
    with torch.no_grad():
        a = encoder(plain[0].contiguous())
        b = encoder(plain[0].contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.fault(19)
def test_bank_larger_than_the_data_or_empty(tmp_path):
    """A bank of 4,096 rows on 40 images trains, with a note; a bank without rows is exit 2."""
    root = folder_of(tmp_path / "p", 40)
    bank = ["teacher.momentum=0.9", "objective.name=info-nce"]
    done = pretrain(root, tmp_path / "run", *bank, "bank.size=4096")
    assert done.returncode == 0 and all(map(math.isfinite, losses(tmp_path / "run"))), done.stderr
    assert all(fact in done.stderr for fact in ("4,096", "40 images", "bank.size=20"))
    one_line(pretrain(root, tmp_path / "other", *bank, "bank.size=0"), 2, "bank.size", "at least 1")
    z, keys = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    with pytest.raises(ValueError, match="bank"):
        objective("info-nce")(z, keys=keys, bank=torch.empty(0, 3))


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """Train on a flat folder of 40 images, whose labels come from a CSV."""
    place = tmp_path_factory.mktemp("flat")
    root = folder_of(place / "pictures", 40)
    assert pretrain(root, place / "run").returncode == 0
    return place / "run", [f"{number:04d}.png" for number in range(40)]


@pytest.mark.fault(37)
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (lambda names: [(n, i % 2) for i, n in enumerate(names[:30])], ["10 of 40", "0030.png"]),
        (lambda names: [(n, i % 2) for i, n in enumerate(names)] + [(names[0], 1)], ["0000.png"]),
        (lambda names: [(n, "cat") for n in names], ["'cat'"]),
        (lambda names: [], ["labels.csv"]),
        (lambda names: [(n,) for n in names], ["labels.csv"]),
        (lambda names: [(n.upper(), i % 2) for i, n in enumerate(names)], ["40 of 40"]),
        (lambda names: [(n, "" if i else "a") for i, n in enumerate(names)], ["0001.png"]),
    ],
    ids=["missing", "twice", "one-class", "empty", "one-column", "other-names", "empty-label"],
)
def test_labels_that_do_not_fit(flat, tmp_path, rows, words):
    """Exit 3 with counts and the first name; the run's probes are unchanged."""
    run, names = flat
    table = tmp_path / "labels.csv"
    table.write_text("".join(",".join(map(str, row)) + "\n" for row in rows(names)))
    one_line(kontrast("probe", str(run), "knn", "--labels", str(table), "--device", "cpu"), 3, *words)
    assert not (run / "probes.json").exists()


@pytest.mark.fault(37)
def test_labels_that_are_not_a_table(flat, tmp_path):
    """Exit 3 names the file, for a folder, a missing file, binary data or an endless field."""
    run, _ = flat
    (tmp_path / "bytes.csv").write_bytes(b"\x00\xff" * 50)
    (tmp_path / "field.csv").write_text("a," + "x" * 200_000 + "\n")
    (tmp_path / "open.csv").write_text('"never closed,' + "\n" * 100)
    for name in (".", "none.csv", "bytes.csv", "field.csv", "open.csv"):
        done = kontrast("probe", str(run), "knn", "--labels", str(tmp_path / name), "--device", "cpu")
        one_line(done, 3, str(tmp_path))


@pytest.mark.fault(37)
@pytest.mark.parametrize("probe", ["knn", "linear"])
def test_more_neighbors_than_images(tmp_path, probe):
    """k is lowered, with a note; a class with one image stays in training, and accuracies are numbers."""
    root = folder_of(tmp_path / "p", 12, classes=3)
    (root / "lone").mkdir()
    (root / "class0" / "0000.png").rename(root / "lone" / "one.png")
    done = pretrain(root, tmp_path / "run", "evaluation.k=200")
    assert done.returncode == 0, done.stderr
    done = kontrast("probe", str(tmp_path / "run"), probe, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    if probe == "knn":
        assert "200" in done.stderr
    for found in json.loads(done.stdout)["probes"]:
        assert 0 <= found["low"] <= found["accuracy"] <= found["high"] <= 1


@pytest.mark.fault(37)
def test_one_class_and_unknown_test_class(tmp_path):
    """One class gives no labels, with a note; a test class that is missing in training is exit 3."""
    folder_of(tmp_path / "one" / "only", 20)
    done = kontrast("pretrain", str(tmp_path / "one"), *QUICK, "--device", "cpu", "--out", str(tmp_path / "run"))
    assert done.returncode == 0 and "no labels" in done.stderr, done.stderr
    folder_of(tmp_path / "two" / "train", 8, classes=2)
    folder_of(tmp_path / "two" / "test" / "strange", 4)
    folder_of(tmp_path / "two" / "test" / "class0", 4)
    done = kontrast("pretrain", str(tmp_path / "two"), *QUICK, "--device", "cpu", "--out", str(tmp_path / "other"))
    one_line(done, 3, "strange", "train")
