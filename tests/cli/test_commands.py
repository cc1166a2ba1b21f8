"""The command as users see it: results on standard output, errors of one line, exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.command_line import TINY, kontrast, one_line, real


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Make two folders of small JPEGs, one per class; one folder name is HTML."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number, name in enumerate(["cats", "<b>dogs</b>"]):
        (root / name.replace("/", "_")).mkdir()
        for i in range(40):
            picture = rng.integers(0, 120, (32, 36, 3)) + 100 * number
            Image.fromarray(picture.astype(np.uint8)).save(root / name.replace("/", "_") / f"{i}.jpg")
    return root


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    done = kontrast("pretrain", str(photos), *TINY, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert Path(tree["report"]).is_file()
    assert {(p["probe"], p["features"]) for p in tree["probes"]} == {
        (probe, features) for probe in ("knn", "linear") for features in ("trained", "untrained", "pixels")
    }
    return out


def test_a_run_inside_the_image_folder_is_not_data(photos, tmp_path):
    """The second `pretrain .` does not train on the pictures of the first run."""
    shutil.copytree(photos, tmp_path / "p")
    for name in ("one", "two"):
        out = tmp_path / "p" / "runs" / name
        assert kontrast("pretrain", str(tmp_path / "p"), *TINY, "--out", str(out)).returncode == 0
    counts = {
        json.loads((tmp_path / "p" / "runs" / n / "run.json").read_text())["data"]["images"] for n in ("one", "two")
    }
    assert len(counts) == 1


def test_a_run_overwrites_no_files_of_the_user(photos, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("report.html", "encoder.safetensors", "probes.json"):
        (mine / name).write_text("mine")
        one_line(kontrast("pretrain", str(photos), *TINY, "--out", str(mine)), 2, name, "--out")
        assert [p.read_text() for p in mine.iterdir()] == ["mine"]
        (mine / name).unlink()
    (mine / "notes.txt").write_text("mine")
    assert kontrast("pretrain", str(photos), *TINY, "--out", str(mine)).returncode == 0
    assert (mine / "notes.txt").read_text() == "mine"


def test_the_run_folder_must_differ_from_the_image_folder(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, tmp_path / "p")
    one_line(kontrast("pretrain", "p", *TINY, "--out", str(tmp_path / "p")), 2, "--out")
    one_line(kontrast("pretrain", "p", *TINY, "--out", ""), 2, "--out")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["p"] and not (tmp_path / "p" / "checkpoints").exists()


def test_a_probe_on_other_images_does_not_change_the_report(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = kontrast("report", str(run)).stdout, (run / "gallery.json").read_bytes(), verdict_of(run)
    assert kontrast("probe", str(run), "knn", "--data", "digits").returncode == 0
    assert (kontrast("report", str(run)).stdout, (run / "gallery.json").read_bytes(), verdict_of(run)) == before
    (tmp_path / "flat").mkdir()
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(tmp_path / "flat" / f"{number}.png")
    one_line(kontrast("probe", str(run), "--data", str(tmp_path / "flat")), 3, "no labels")


def verdict_of(run: Path) -> str:
    """Return the verdict in the run's report."""
    return re.search(r'"verdict":"([^"]*)"', (run / "report.html").read_text())[1]


def test_pack_overwrites_neither_images_nor_another_store(photos, tmp_path):
    one_line(kontrast("pack", str(photos), str(photos)), 2, str(photos))
    one_line(kontrast("pack", str(photos), str(tmp_path / "s"), "--size", "-3"), 2, "1 pixel")
    assert kontrast("pack", str(photos), str(tmp_path / "s")).returncode == 0
    one_line(kontrast("pack", "digits", str(tmp_path / "s")), 2, str(tmp_path / "s"))
    assert kontrast("pack", str(photos), str(tmp_path / "s")).returncode == 0


def test_the_options_about_images_become_settings_of_the_recipe(photos, tmp_path):
    few = ["training.batch=4096", *(word for word in TINY if "batch" not in word)]
    words = ["--allow-small", "--follow-links", "--max-bad", "0.5", "--no-probes", "--out", str(tmp_path / "run")]
    assert kontrast("pretrain", str(photos), *few, *words[1:]).returncode == 3
    assert kontrast("pretrain", str(photos), *few, *words).returncode == 0
    data = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())["data"]
    assert (data["allow_small"], data["follow_links"], data["max_bad"]) == (True, True, 0.5)


def test_training_on_a_folder_writes_probes_and_a_report(finished):
    names = {p.name for p in finished.iterdir()}
    expected = {"recipe.toml", "run.json", "metrics.jsonl", "checkpoints", "encoder.safetensors", "probes.json"}
    assert expected | {"report.html", "gallery.json", "gallery.png"} <= names
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    assert {"step", "epoch", "loss", "attraction", "repulsion", "lr"} <= set(trained[-1])
    assert trained[-1]["loss"] == pytest.approx(trained[-1]["attraction"] + trained[-1]["repulsion"])


def test_training_without_labels_reports_what_is_missing(photos, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in (photos / "cats").glob("*.jpg"):
        (flat / path.name).write_bytes(path.read_bytes())
    done = kontrast("pretrain", str(flat), *TINY, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "no labels" in done.stderr and (tmp_path / "run" / "report.html").is_file()
    assert not (tmp_path / "run" / "probes.json").exists()
    one_line(kontrast("probe", str(tmp_path / "run"), "knn"), 3, "flat", "no labels", "--labels")
    assert kontrast("probe", str(tmp_path / "run")).returncode == 0, "the default probes are optional"


def test_probe_and_report_on_a_finished_run(finished, tmp_path):
    done = kontrast("probe", str(finished), "knn", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["probes"]) == 3
    page = tmp_path / "page.html"
    done = kontrast("report", str(finished), "--out", str(page))
    assert done.returncode == 0 and page.stat().st_size > 10_000


def test_the_python_functions_do_the_same(photos, tmp_path):
    import torch

    import kontrast as library

    settings = {"epochs": 1, "batch": 16, "max_steps": 2}
    run = library.pretrain(
        photos,
        out=tmp_path / "run",
        training=settings,
        **{"encoder.width": 16, "evaluation.every": 0},
        say=lambda _: None,
    )
    for one in (run, run.path, str(run.path)):
        assert library.load(one)(torch.zeros(2, 3, 32, 32)).shape == (2, 16)
    with pytest.raises(TypeError, match="NoneType"):
        library.load(None)
    assert run.recipe.training.max_steps == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["pretrain", "--recipe", "quikstart"], 2, ["quikstart", "'quickstart'"]),
        (["pretrain", "training.epoch=3"], 2, ["training.epoch", "'epochs'"]),
        (["pretrain", "training.epochs=three"], 2, ["training.epochs", "whole number"]),
        (["pretrain", "objective.name=nt-xnet"], 2, ["nt-xnet", "'nt-xent'"]),
        (["pretrain", "objective.temprature=1"], 2, ["temprature", "'temperature'"]),
        (["pretrain", "objective.temperature=-1"], 2, ["temperature", "-1"]),
        (["pretrain", "encoder.name=resnet-81"], 2, ["resnet-81", "'resnet-18'"]),
        (["pretrain", "views.policy=simclar"], 2, ["simclar", "'simclr'"]),
        (["pretrain", "views.crop_scal=1"], 2, ["crop_scal", "'crop_scale'"]),
        (["pretrain", "training.warmup=9", "training.epochs=2"], 2, ["training.warmup", "9", "2"]),
        (["pretrain", "training.milestones=[3,1]"], 2, ["training.milestones", "[3, 1]"]),
        (["pretrain", "nowhere"], 3, ["nowhere"]),
        (["pretrain", "--device", "cuda"], 6, ["cuda"]),
        (["pretrain", "--device", "tpu"], 2, ["tpu"]),
        (["pretrain", "--resume"], 2, ["--out"]),
        (["pretrain", "training.batch=100000"], 3, ["6144", "100000"]),
        (["probe", "nowhere"], 2, ["nowhere", "run folder"]),
        (["report", "nowhere"], 2, ["nowhere"]),
        (["explain", "dlc"], 2, ["dlc", "'dcl'"]),
        (["explain", "supcon"], 2, ["supcon", "nt-xent"]),
        (["explain", "timm:resnet18"], 2, ["timm:NAME", "torchvision:NAME"]),
        (["pretrain", "encoder.name=mine"], 2, ["timm:NAME", "kontrast --import FILE.py"]),
        (["compare", "supcon", "dcl"], 2, ["supcon", "nt-xent"]),
        (["compare", "my-own-loss", "dcl"], 2, ["my-own-loss", "--import FILE.py"]),
        (["unknown"], 2, ["unknown"]),
        (["pretrain", "--no-such-option"], 2, ["--no-such-option"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and value[0] in ("pretrain",) else None,
)
def test_a_mistake_is_reported_in_one_line(arguments, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "cuda" in arguments:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    done = kontrast(*arguments)
    one_line(done, code, *words)
    assert done.stderr.count("\n") == 1, "nothing but the error is printed"
    assert not list(tmp_path.iterdir()), "a refused command must leave nothing behind, not even runs/"


def test_empty_folders_and_folders_without_images_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    one_line(kontrast("pretrain", str(tmp_path / "empty"), "--out", str(tmp_path / "run")), 3, "empty")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "notes.txt").write_text("no image")
    one_line(kontrast("pretrain", str(tmp_path / "words"), "--out", str(tmp_path / "run")), 3, "words")
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_not_overwritten(finished, photos):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    one_line(kontrast("pretrain", str(photos), *TINY, "--out", str(finished)), 2, str(finished), "--resume")
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*")} == before


def test_resuming_a_finished_run_changes_nothing(finished):
    weights = (finished / "encoder.safetensors").read_bytes()
    done = kontrast("pretrain", "--resume", "--out", str(finished), "--no-probes")
    assert done.returncode == 0, done.stderr
    assert (finished / "encoder.safetensors").read_bytes() == weights
    one_line(kontrast("pretrain", "--resume", "--out", str(finished), "training.lr=9.0"), 2, "training.lr", "9.0")


def test_help_does_not_import_torch(tmp_path):
    """Help takes less than half a second because it imports nothing heavy; a time limit would measure the machine."""
    for name in ("torch", "numpy", "PIL"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    done = real("--help", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 0 and "pretrain" in done.stdout


def test_version_and_module_and_a_reader_that_leaves():
    assert real("--version").stdout.strip()
    done = subprocess.run(f"{sys.executable} -m kontrast recipes | head -1", shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Error" not in done.stderr


@pytest.mark.parametrize("name", ["cacr", "quickstart", "small-alexnet", "moco-v3", "simclr"])
def test_explain_shows_what_a_name_means(name):
    done = kontrast("explain", name)
    assert done.returncode == 0 and name in done.stdout
    assert "\\n" not in done.stdout and len(done.stdout.splitlines()) > 5
    if name == "cacr":
        for word in ("t_plus", "t_minus", "negatives", "CACR(", "cifar10/cacr* (", "t_minus=2.0"):
            assert word in done.stdout
    assert json.loads(kontrast("explain", name, "--json").stdout)["name"] == name


def test_explain_shows_everything_with_that_name():
    done = kontrast("explain", "simclr")
    assert "head simclr" in done.stdout and "view policy simclr" in done.stdout
    tree = json.loads(kontrast("explain", "simclr", "--json").stdout)
    assert [tree["kind"], *(other["kind"] for other in tree["also"])] == ["head", "policy"]
    one_line(kontrast("explain", "cacr-k4"), 2, "'cifar10/cacr-k4'", "stl10/cacr-k4")


def test_explain_shows_the_docstring():
    from kontrast.objectives import CACR

    shown = [line.strip() for line in kontrast("explain", "cacr").stdout.splitlines()]
    assert all(line.strip() in shown for line in CACR.__doc__.splitlines())


@pytest.mark.parametrize("name", ["cacr", "nt-xent", "resnet-18", "simclr", "small-alexnet"])
def test_explain_summarizes_long_lists_of_recipes(name):
    from kontrast.cli.explain import SHORT_LIST, explain, summarize

    tree = explain(name).to_dict()
    parts = summarize(tree["recipes"])
    counted = sum(int(part.partition("* (")[2].rstrip(")") or 1) for part in parts)
    assert len(parts) <= SHORT_LIST and (parts == ["none"] or counted == len(tree["recipes"]))
    assert not any(part.startswith("*") for part in parts), "recipes without a folder begin with nothing in common"


def test_the_bare_command_shows_its_help():
    bare = kontrast()
    assert bare.returncode == 0 and bare.stdout == kontrast("--help").stdout and "pretrain" in bare.stdout


def test_a_dumb_terminal_in_the_c_locale_is_enough(photos, tmp_path):
    done = real("pretrain", str(photos), *TINY, "--out", str(tmp_path / "r"), LANG="C", NO_COLOR="1", TERM="dumb")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr + done.stdout
