"""Audits with tiny trainings, their parts, and (slow) the paper's claim on the embedded digits."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from kontrast.cli.main import run
from kontrast.config.recipe_files import resolve
from kontrast.data import open_data
from kontrast.data.competing_features import random_bits
from kontrast.errors import CheckpointError, DataError, NumbersError, UsageError
from kontrast.kernels.projections import directions_and_prior, sliced_wasserstein
from kontrast.objectives import objective
from kontrast.reports import report
from kontrast.studies.audit.audit import audit, base_recipe, choose_learners, plan, standardize_pixels
from kontrast.studies.audit.audit_summary import average_seeds, summarize, verdict
from kontrast.studies.audit.autoencoder import VariationalAutoencoder
from kontrast.studies.audit.baselines import Supervised, fit, with_small_batches
from kontrast.studies.audit.retained_features import probe_bits, probe_factor, retrieval
from kontrast.studies.audit.saturation import log_sum_exp, measure_saturation, simplex_value, trained_term, wasserstein
from kontrast.training.learner import build_student

from support.tiny_run import images

TINY = ["training.batch=32", "training.warmup=0.0", "training.lr=0.1", "encoder.width=16", "views.size=32"]
CPU = torch.device("cpu")
OUT = Path("out")


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """An audit of 0 and 3 bits and of 4 digits on a folder with class folders."""
    out = tmp_path_factory.mktemp("audit")
    arguments = {"bits": [0, 3], "digits": [4], "steps": 3, "overrides": TINY, "device": "cpu"}
    return out, audit(str(images()), out=out, **arguments, say=quiet), arguments


def test_every_learner_is_trained_with_every_amount(labeled):
    _, found, _ = labeled
    met = {(c["learner"], c["feature"], c["amount"]) for c in found.cells}
    learners = ("nt-xent 0.1", "supervised", "VAE", "untrained")
    assert met == {(n, f, a) for n in learners for f, a in (("bits", 0), ("bits", 3), ("digits", 4))}
    assert all(c["status"] == "finished" and c["target"] == "labels" for c in found.cells)
    assert all(c["low"] <= c["accuracy"] <= c["high"] for c in found.cells)
    assert json.loads(found.file.read_text())["finished"] and len(found.runs) == 3


def test_the_added_feature_is_probed_if_there_is_one(labeled):
    _, found, _ = labeled
    read = {(c["learner"], c["feature"], c["amount"]): c["injected"] for c in found.cells}
    assert read["VAE", "bits", 0] is None
    assert all(0 <= read[name, "bits", 3] <= 1 for name in ("VAE", "untrained", "supervised", "nt-xent 0.1"))
    assert 0 <= read["supervised", "digits", 4] <= 1


def test_the_report_shows_the_verdict_of_the_audit(labeled):
    out, found, _ = labeled
    page = report(found.runs, out / "page.html", out / "audit.json").read_text()
    start = page.index('id="data">') + len('id="data">')
    data = json.loads(page[start : page.index("</script>", start)])
    assert data["verdict"] == found.verdict and "3 random bits" in data["verdict"]
    assert [p["id"] for p in data["study"]["plots"]][:2] == ["audit-bits", "audit-bits-injected"]
    assert len(data["study"]["tables"]) == 2 and not data["study"]["problems"]
    assert len(page) < 5_000_000


def test_finished_cells_are_not_trained_again(labeled):
    out, found, arguments = labeled
    said: list[str] = []
    again = audit(str(images()), out=out, **arguments, say=said.append)
    assert again == found and sum("already finished" in line for line in said) == 12
    with pytest.raises(UsageError, match="other settings"):
        audit(str(images()), out=out, **{**arguments, "steps": 2}, say=quiet)


@pytest.fixture
def copied(labeled, tmp_path, monkeypatch):
    """The audit without its first cell. Nothing may be trained, and audit.json must not change."""
    out, _, arguments = labeled
    place = tmp_path / "audit"
    shutil.copytree(out, place)
    (place / "cells" / "nt-xent-0.1-bits0-seed0.json").unlink()
    trained: list[str] = []
    monkeypatch.setattr(
        "kontrast.studies.audit.audit.train_and_probe", lambda cell, *_: trained.append(cell.name) or {}
    )

    def again():
        audit(str(images()), out=place, **arguments, say=quiet)

    yield place, again
    assert trained == [] and (place / "audit.json").read_bytes() == (out / "audit.json").read_bytes()


def test_other_settings_are_refused_before_any_training(copied):
    place, again = copied
    folder = place / "runs" / "nt-xent-0.1-digits4-seed0"
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text.replace("lr = 0.1", "lr = 0.2"))
    info = json.loads((folder / "run.json").read_text())
    del info["recipe_sha256"]
    (folder / "run.json").write_text(json.dumps(info))
    with pytest.raises(UsageError, match=r"training.lr 0.2 -> 0.1"):
        again()


def test_cells_on_other_images_are_refused(copied):
    _, again = copied
    path = sorted(images().rglob("*.png"))[0]
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    try:
        with pytest.raises(DataError, match="images changed"):
            again()
    finally:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("content", ["[]", "{}"])
def test_a_damaged_cell_is_refused(content, copied):
    place, again = copied
    (place / "cells" / "vae-bits3-seed0.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"vae-bits3-seed0\.json is damaged"):
        again()


@pytest.mark.parametrize("kind", [UsageError, DataError, CheckpointError, NumbersError])
def test_a_failed_cell_does_not_stop_the_others(kind, tmp_path, monkeypatch):
    from kontrast.studies.audit import audit as module

    measured, train_and_probe = [], module.train_and_probe

    def fail_once(cell, *arguments):
        measured.append(cell.name)
        if len(measured) == 1:
            raise kind("the reason")
        return train_and_probe(cell, *arguments)

    monkeypatch.setattr(module, "train_and_probe", fail_once)
    arguments = {"bits": [0], "steps": 1, "overrides": TINY, "out": tmp_path / "out", "device": "cpu", "say": quiet}
    found = audit(str(images()), **arguments)
    assert [cell["status"] for cell in found.cells] == ["failed", "finished", "finished", "finished"]
    assert found.verdict.endswith("1 training failed.")
    assert (found.cells[0]["reason"], found.cells[0]["exit_code"]) == ("the reason", kind.exit_code)
    audit(str(images()), **arguments)
    again = [] if kind is NumbersError else measured[:1]  # the same numbers would fail again, a full disk may not
    assert measured[4:] == again


@pytest.mark.parametrize("kind", [UsageError, DataError, NumbersError])
def test_an_audit_fails_with_its_first_error_if_all_cells_fail(kind, tmp_path, monkeypatch):
    def fail(*_):
        raise kind("the reason")

    monkeypatch.setattr("kontrast.studies.audit.audit.train_and_probe", fail)
    with pytest.raises(kind, match=r"all 4 .*the reason"):
        audit(str(images()), bits=[0], steps=1, overrides=TINY, out=tmp_path / "out", device="cpu", say=quiet)


def test_an_interrupted_cell_is_resumed(labeled, tmp_path):
    """A finished run without a record is probed again; without its encoder it is resumed."""
    out, _, _ = labeled
    shutil.copytree(out, tmp_path / "audit")
    record = tmp_path / "audit" / "cells" / "nt-xent-0.1-bits3-seed0.json"
    before = json.loads(record.read_text())
    record.unlink()
    (tmp_path / "audit" / "runs" / "nt-xent-0.1-bits3-seed0" / "encoder.safetensors").unlink()
    audit(
        str(images()), out=tmp_path / "audit", bits=[0, 3], digits=[4], steps=3, overrides=TINY, device="cpu", say=quiet
    )
    assert json.loads(record.read_text())["accuracy"] == before["accuracy"]


def test_without_labels_images_are_retrieved(tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, picture in enumerate(sorted(images().rglob("*.png"))[:80]):
        shutil.copy(picture, flat / f"{number}.png")
    found = audit(str(flat), bits=[0, 2], steps=2, overrides=TINY, out=tmp_path / "out", device="cpu", say=quiet)
    assert {c["learner"] for c in found.cells} == {"nt-xent 0.1", "VAE", "untrained"}
    assert all(c["target"] == "retrieval" and c["n"] == 80 for c in found.cells)
    assert "retrieval accuracy" in found.verdict


def test_retrieval_ignores_the_bits():
    """A network that uses only the bits finds no image; one that uses the pixels does better than chance."""
    recipe = resolve("quickstart", ["data.random_bits=8"])
    shown = random_bits(open_data("digits", "test").first(100), 8)

    class Bits(torch.nn.Module):
        def forward(self, x):
            return x[:, 3:].mean((2, 3))

    class Pixels(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.avg_pool2d(x[:, :3].mean(1, keepdim=True), 4).flatten(1)

    assert retrieval(Bits(), recipe, shown, CPU)["accuracy"] <= 0.05
    assert retrieval(Pixels(), recipe, shown, CPU)["accuracy"] > 0.1


def test_factor_probes_find_linear_factors():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 12, generator=generator) for n in (400, 200))
    assert probe_factor("position", x, x[:, :2], y, -y[:, :2]) == 0.0, "worse than the mean counts as 0"
    mix = torch.randn(12, 2, generator=generator)
    assert probe_factor("position", x, x @ mix, y, y @ mix) > 0.99
    assert probe_factor("hue", x, (x[:, 0] > 0).long(), y, (y[:, 0] > 0).long()) > 0.95
    assert probe_bits(x, (x[:, :3] > 0).byte(), y, (y[:, :3] > 0).byte()) > 0.95
    coins = torch.randint(2, (600, 3), generator=generator).byte()
    assert abs(probe_bits(x, coins[:400], y, coins[400:]) - 0.5) < 0.12


def test_objectives_without_a_temperature_are_planned_once():
    base = resolve("quickstart", ["training.max_steps=1"])
    cells = plan(base, choose_learners(["nt-xent", "swd"], [0.1, 0.2], labeled=True), {"bits": [0]}, OUT)
    assert [cell.facts["learner"] for cell in cells] == [
        "nt-xent 0.1",
        "nt-xent 0.2",
        "swd",
        "supervised",
        "VAE",
        "untrained",
    ]
    assert cells[1].recipe.objective.arguments["temperature"] == 0.2
    with pytest.raises(UsageError, match="unknown objective"):
        choose_learners(["nt-xnet"], [0.1], labeled=True)
    with pytest.raises(UsageError, match="temperature"):
        plan(base, choose_learners(["nt-xent"], [-0.1], labeled=True), {"bits": [0]}, OUT)


@pytest.mark.parametrize("size", [28, 32, 33, 64])
def test_the_autoencoder_reconstructs_every_channel_at_any_size(size):
    model = VariationalAutoencoder(resolve("quickstart", [f"views.size={size}"]), 5)
    x = torch.rand(3, 5, size, size)
    logits, mean, log_variance = model(x)
    assert logits.shape == x.shape and mean.shape == log_variance.shape == (3, 64)
    assert model.encoder(x).shape == (3, model.encoder.width)


def test_the_autoencoder_has_the_gaussian_divergence():
    model = VariationalAutoencoder(resolve("quickstart", [])).eval()
    x = torch.rand(4, 3, 32, 32)
    _, mean, log_variance = model(x)
    normal = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    expected = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum(1).mean()
    torch.manual_seed(5)
    whole = model.loss(x)
    model.beta = 0.0
    torch.manual_seed(5)
    torch.testing.assert_close(whole - model.loss(x), expected, rtol=1e-3, atol=1e-2)


def test_baselines_learn_from_the_batches_of_the_recipe():
    recipe = resolve("digits/simclr", ["training.max_steps=25", "training.batch=64", "encoder.width=32"])
    train = open_data("digits", "train").first(64)
    torch.manual_seed(0)
    losses: list[float] = []
    model = Supervised(recipe, 3, 10)

    def loss(x, labels):
        value = model.loss(x, labels)
        losses.append(value.item())
        return value

    fit(model, loss, recipe, train, CPU, "supervised")
    assert len(losses) == 25 and losses[-1] < losses[0] - 0.1 and not model.training


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_training_takes_the_given_number_of_steps(tmp_path, monkeypatch, epochs):
    """192 images in batches of 32 are 6 steps per epoch; the number of epochs grows if it is too small."""
    taken: dict[str, int] = {}
    step = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *a: taken.update(n=taken.get("n", 0) + 1) or step(*a))
    found = audit(
        str(images()), bits=[0], steps=10, overrides=[*TINY, f"training.epochs={epochs}"], out=tmp_path / "out",
        device="cpu", say=quiet,
    )  # fmt: skip
    assert taken == {"n": 2 * 10}, "supervised training and the autoencoder, both with batches of 32"
    assert json.loads((found.runs[0] / "run.json").read_text())["steps"] == 10


def test_baselines_see_the_images_of_the_contrastive_run(tmp_path, monkeypatch):
    """A label imbalance applies to every training; probes use the whole balanced set."""
    seen = []
    monkeypatch.setattr("kontrast.studies.audit.baselines.fit", lambda *a: seen.append(len(a[3])))
    overrides = [*TINY, "data.imbalance=linear"]
    found = audit(str(images()), bits=[0], steps=1, overrides=overrides, out=tmp_path / "out", device="cpu", say=quiet)
    facts = json.loads((found.runs[0] / "run.json").read_text())["data"]
    assert seen == [facts["images"]] * 2 and facts["images"] < 192


def test_baselines_end_with_the_epochs_of_the_recipe():
    recipe = resolve("digits/simclr", ["training.max_steps=25", "training.epochs=3", "training.batch=32"])
    model, losses = Supervised(recipe, 3, 10), []
    train = open_data("digits", "train").first(64)
    fit(model, lambda *a: losses.append(0) or model.loss(*a), recipe, train, CPU, "supervised")
    assert len(losses) == 6


def test_the_autoencoder_sees_the_same_views_and_as_many_images():
    recipe = resolve("quickstart", ["training.max_steps=30", "views.policy=moco-v2"])
    changed = with_small_batches(recipe)
    assert changed.views == recipe.views and changed.encoder == recipe.encoder
    assert changed.training.batch * changed.training.max_steps == recipe.training.batch * recipe.training.max_steps


def test_the_autoencoder_counts_every_pixel_but_a_bit_once():
    """If all logits are 0, every pixel and every bit costs ln 2, and the 32 x 32 copies of a bit count once."""
    recipe = resolve("quickstart", ["views.mean=[0.4, 0.5, 0.6]", "views.std=[0.2, 0.3, 0.4]", "data.random_bits=2"])
    model = VariationalAutoencoder(recipe, 5, beta=0.0).eval()
    model.decoder = torch.nn.Module()
    model.decoder.forward = lambda h: torch.zeros(len(h), 5, 32, 32)
    x = torch.cat([torch.randn(2, 3, 32, 32), torch.ones(2, 2, 32, 32)], 1)
    assert model.loss(x).item() == pytest.approx((3 * 32 * 32 + 2) * math.log(2), rel=1e-6)
    sure = torch.cat([torch.full((2, 3, 32, 32), 20.0), torch.full((2, 2, 32, 32), -20.0)], 1)
    model.decoder.forward = lambda h: sure
    white = torch.cat([torch.full((2, 3, 32, 32), 9.0), torch.zeros(2, 2, 32, 32)], 1)  # 9 is past white
    assert model.loss(white).item() == pytest.approx(0, abs=1e-3)


def test_pixels_are_standardized_unless_the_views_do_it():
    train = open_data("digits", "train")
    made = standardize_pixels(resolve("quickstart", []), train).views.arguments
    pixels = train.images.double() / 255
    torch.testing.assert_close(torch.tensor(made["mean"]).double(), pixels.mean((0, 2, 3)), atol=0.02, rtol=0)
    torch.testing.assert_close(torch.tensor(made["std"]).double(), pixels.std((0, 2, 3)), atol=0.02, rtol=0)
    own = resolve("quickstart", ["views.policy=moco-v2"])
    assert standardize_pixels(own, train) == own


def test_all_learners_start_with_the_same_encoder():
    """Only the objective differs: architecture, initial weights and views are the same."""
    base, _ = base_recipe(None, 0, [], CPU, quiet)
    assert base.encoder.name == "convn"
    built = []
    for make in (lambda: build_student(base, 3), lambda: VariationalAutoencoder(base), lambda: Supervised(base, 3, 10)):
        torch.manual_seed(base.seed)
        built.append(make().encoder.state_dict())
    for other in built[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in built[0].items())


def test_seeds_are_planned_in_order_and_averaged():
    base = resolve("quickstart", ["training.max_steps=1", "seed=4"])
    cells = plan(base, choose_learners(["swd"], [], labeled=False), {"bits": [0, 2]}, OUT, seeds=2)
    assert [c.recipe.seed for c in cells] == [4] * 6 + [5] * 6
    assert cells[0].name == "swd-bits0-seed4" and len({c.name for c in cells}) == 12
    with pytest.raises(UsageError, match="--seeds 0"):
        plan(base, choose_learners(["swd"], [], labeled=False), {"bits": [0]}, OUT, seeds=0)
    fine = {"learner": "swd", "feature": "bits", "amount": 0, "status": "finished", "target": "labels", "low": 0.0,
            "high": 1.0, "injected": None, "factors": {"hue": 0.2}}  # fmt: skip
    failed = {**fine, "status": "failed", "reason": "x"}
    (point,) = average_seeds([{**fine, "accuracy": 0.5}, failed, {**fine, "accuracy": 0.6, "factors": {"hue": 0.4}}])
    assert point["accuracy"] == pytest.approx(0.55) and point["seeds"] == 2
    assert point["factors"]["hue"] == pytest.approx(0.3)
    assert (point["low"], point["high"]) == (0.0, 1.0)  # Student's t of two seeds is wide and is clipped to [0, 1]
    assert average_seeds([failed])[0]["status"] == "failed"
    assert "means of 2 seeds" in verdict([point, {**point, "amount": 3, "accuracy": 0.2}])


def test_the_verdict_has_the_numbers():
    def cell(learner, amount, accuracy):
        return {"learner": learner, "feature": "bits", "amount": amount, "accuracy": accuracy, "target": "labels"}

    cells = [cell("nt-xent 0.1", 0, 0.8), cell("nt-xent 0.1", 10, 0.31), cell("VAE", 0, 0.62), cell("VAE", 10, 0.6)]
    assert verdict(cells) == (
        "10 random bits lowered the linear probe accuracy of NT-Xent at temperature 0.1 from 0.80 to 0.31; "
        "the VAE went from 0.62 to 0.60."
    )
    fine = [*cells, cell("supervised", 0, 0.9), cell("supervised", 10, 0.85)]
    assert verdict(fine).endswith("supervised training went from 0.90 to 0.85.")
    lost = [*cells, cell("supervised", 0, 0.9), cell("supervised", 10, 0.1)]
    assert "more --steps" in verdict(lost)


def test_failed_cells_are_in_the_table():
    failed = {"learner": "nt-xent 0.1", "feature": "bits", "amount": 5, "status": "failed", "reason": "x"}
    fine = {"learner": "nt-xent 0.1", "feature": "bits", "amount": 0, "status": "finished", "target": "labels",
            "accuracy": 0.5, "low": 0.4, "high": 0.6, "injected": None, "factors": {}}  # fmt: skip
    found = summarize([fine, failed], "digits", 10)
    assert found["tables"][0]["rows"] == [["NT-Xent at temperature 0.1", "0.500, 0.400 to 0.600", "failed"]]


@pytest.mark.parametrize(
    ("accuracies", "title"),
    [
        ([0.5], "What each learner retains with random bits"),
        ([0.5, 0.6], "No learner loses accuracy as random bits are added"),
        ([0.6, 0.5], "NT-Xent at temperature 0.1 loses most accuracy, 10 points, as random bits are added"),
    ],
)
def test_the_title_of_a_curve_names_the_largest_loss_of_accuracy(accuracies, title):
    cells = [
        {"learner": "nt-xent 0.1", "feature": "bits", "amount": amount, "status": "finished", "target": "labels",
         "accuracy": value, "low": value, "high": value, "injected": None, "factors": {}}
        for amount, value in enumerate(accuracies)
    ]  # fmt: skip
    assert summarize(cells, "digits", 10)["plots"][0]["title"] == title


def test_the_saturation_reference_has_the_values_of_the_paper():
    """For a batch of 128 and 64 dimensions it is flat after four bits at temperature 1, but not before ten at 0.1."""
    found = [round(simplex_value(k, 1.0), 2) for k in (2, 4, 6, 8)]
    assert found == [5.04, 4.89, 4.86, 4.85]
    assert [round(simplex_value(k, 0.1), 2) for k in (2, 4, 6, 8)] == [13.46, 12.07, 10.69, 9.31]
    # exp(1/0.0001) overflows; the sum is then dominated by images of the same kind: log((B - 1)/2^k) + 1/tau.
    assert simplex_value(1, 0.0001) == pytest.approx(math.log(127 / 2) + 10_000)
    corners = torch.eye(4) - 0.25
    z = corners.repeat(32, 1)
    # The only difference: 31 others at the same corner instead of the expected 127/4.
    assert float(log_sum_exp(z, 1.0)) == pytest.approx(simplex_value(2, 1.0), abs=0.02)


def test_the_saturation_distance_uses_as_many_draws_as_rows():
    z, step = normalize(torch.randn(128, 16, dtype=torch.float64), dim=-1), torch.tensor(0)
    W, P = directions_and_prior("hypersphere", 128, 16, 0, step)
    found = wasserstein(objective("swd", distribution_weight=1.0), z)
    torch.testing.assert_close(found, sliced_wasserstein(z, P, W))


def test_the_recipes_of_figure_b1_train_the_terms_of_the_study():
    """With two equal views attraction has no gradient; in DCL's repulsion each other image appears twice."""
    z = torch.randn(16, 8, dtype=torch.float64)
    for name, arguments, term, more in (
        ("dcl", {"temperature": 0.1}, partial(log_sum_exp, temperature=0.1), math.log(2)),
        ("swd", {"distribution_weight": 1.0}, None, 0.0),
    ):
        recipe = resolve(f"black/{name}")
        assert recipe.objective.name == name and arguments.items() <= recipe.objective.arguments.items()
        loss = objective(name, **recipe.objective.arguments)
        rows = z.clone().requires_grad_()
        terms = loss.terms(rows, rows)
        (alone,) = torch.autograd.grad(terms["repulsion"], rows, retain_graph=True)
        (found,) = torch.autograd.grad(terms["attraction"] + terms["repulsion"], rows)
        torch.testing.assert_close(found, alone)
        if term is not None:
            expected = term(rows)
            torch.testing.assert_close(terms["repulsion"], expected + more)
            torch.testing.assert_close(alone, torch.autograd.grad(expected, rows)[0])


def test_saturation_falls_with_bits(tmp_path):
    found = measure_saturation(out=tmp_path, bits=[1, 4], temperatures=[0.5], steps=25, device="cpu", say=quiet)
    losses = {(c["term"], c["bits"]): c["loss"] for c in found.cells}
    term = "log-sum-exp, temperature 0.5"
    assert losses[term, 4] < losses[term, 1]
    assert json.loads((tmp_path / "audit.json").read_text())["verdict"] == found.verdict
    assert report([], tmp_path / "page.html", tmp_path / "audit.json").stat().st_size > 10_000
    with pytest.raises(UsageError, match="--bits 0"):
        measure_saturation(out=tmp_path, bits=[0, 1], say=quiet)
    cold = measure_saturation(out=tmp_path, bits=[2], temperatures=[0.001], steps=1, device="cpu", say=quiet)
    assert cold.cells[0]["equal_clusters"] > 1000 and math.isfinite(cold.cells[0]["loss"])


@pytest.mark.slow
def test_saturation_by_batch_size_is_resumed(tmp_path, monkeypatch):
    """Figure B.1: ResNet-18 and several batch sizes. Finished trainings are read, not repeated."""
    monkeypatch.setattr("kontrast.studies.audit.saturation.IMAGES", 16)
    said: list[str] = []
    given = {"out": tmp_path, "bits": [1, 2], "temperatures": [1.0], "encoder": "resnet-18", "device": "cpu"}
    first = measure_saturation(**given, epochs=1, batches=[4], say=said.append)
    assert len(said) == len(first.cells) == 4
    whole = measure_saturation(**given, epochs=1, batches=[8, 4], say=said.append)
    assert len(said) == len(whole.cells) == 8 and [c for c in whole.cells if c["batch"] == 4] == first.cells
    assert {c["equal_clusters"] is None for c in whole.cells} == {True, False}
    assert [row[:2] for row in whole.tables[0]["rows"]][:2] == [["log-sum-exp, temperature 1", n] for n in ("4", "8")]
    measure_saturation(**given, epochs=2, batches=[4], say=said.append)
    assert len(said) == 12, "another length is another study"


def test_a_term_that_becomes_nan_is_an_error():
    with pytest.raises(NumbersError, match="2 bits became nan"):
        trained_term(lambda z: z.sum() * float("nan"), 2, 1, CPU)


def test_an_audit_can_be_resumed_after_a_signal(tmp_path, monkeypatch, capsys):
    """A baseline or a probe can't be resumed, but finished cells stay."""
    monkeypatch.setattr("kontrast.studies.audit.audit.train_and_probe", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    place = ["--bits", "0", "--steps", "1", "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert run(["audit", str(images()), *place, *TINY]) == 75
    assert "run the same command again" in capsys.readouterr().err


@pytest.mark.slow
def test_bits_suppress_digits_under_nt_xent_and_not_in_the_baselines(tmp_path):
    """GCL, figure 6 and appendix C.1, on the embedded digits: the same encoder under three objectives."""
    found = audit(out=tmp_path, device="cpu", say=quiet)
    accuracy = {(c["learner"], c["amount"]): c["accuracy"] for c in found.cells}
    nt = [accuracy["nt-xent 0.1", bits] for bits in (0, 5, 10)]
    assert nt[0] > nt[1] + 0.2 > nt[2] + 0.2 and nt[2] < 0.2
    vae = [accuracy["VAE", bits] for bits in (0, 5, 10)]
    assert max(vae) - min(vae) < 0.05 and min(vae) > accuracy["untrained", 0] + 0.1
    supervised = [accuracy["supervised", bits] for bits in (0, 5, 10)]
    assert min(supervised) > 0.8 and supervised[0] - min(supervised) < 0.08
    assert "--steps" not in found.verdict


def test_an_autoencoder_can_count_a_bit_at_every_pixel():
    recipe = resolve("quickstart", ["data.random_bits=2"])
    models = [VariationalAutoencoder(recipe, 5, beta=0.0, each_pixel=each) for each in (True, False)]
    for model in models:
        model.decoder = torch.nn.Module()
        model.decoder.forward = lambda h: torch.zeros(len(h), 5, 32, 32)
    each, once = (model.eval().loss(torch.ones(2, 5, 32, 32)).item() for model in models)
    assert each - once == pytest.approx(2 * (32 * 32 - 1) * math.log(2), rel=1e-4)
