"""Exports for timm, torchvision and the hub: equal features, a card that says what was measured, nothing private."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib

import pytest
import torch
from safetensors.torch import load_file

import kontrast
from kontrast.config.recipe import to_toml
from kontrast.errors import CheckpointError, EnvironmentFault, UsageError
from kontrast.runs.run import Run
from kontrast.training import checkpoints
from kontrast.training.run_folder import RunFolder, sha256

from support import tiny_run
from support.command_line import TINY, one_line
from support.command_line import kontrast as command

PROBES = [
    {"probe": "knn", "features": "trained", "accuracy": 0.9, "low": 0.85, "high": 0.94, "n": 48, "protocol": {}},
    {"probe": "knn", "features": "untrained", "accuracy": 0.4, "low": 0.3, "high": 0.5, "n": 48, "protocol": {}},
    {"probe": "linear", "features": "trained", "accuracy": 0.8, "n": 9, "protocol": {"data": "/home/ada/new photos"}},
    {"probe": "linear", "features": "trained", "accuracy": 0.9, "n": 9, "protocol": {"data": "/home/ada/new photos"}},
]


@pytest.fixture
def run(tmp_path):
    """A run with probes, whose recipe and run.json have absolute paths."""
    place = tiny_run.copy(tmp_path)
    (place / "probes.json").write_text(json.dumps({"version": 1, "probes": PROBES}))
    return place


def replace_encoder(place, **encoder) -> None:
    """Give a run another encoder, with random weights, as if it had been trained with it."""
    recipe = Run(place).recipe
    text = to_toml(recipe)
    old = text[text.index("[encoder]") : text.index("[head]")]
    settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in encoder.items())
    text = text.replace(old, f"[encoder]\n{settings}\n")
    (place / "recipe.toml").write_text(text)
    RunFolder(place).update_info(recipe_sha256=[sha256(text.encode())])
    state = Run(place).untrained().encoder.state_dict()
    RunFolder(place).update_info(encoder_sha256=checkpoints.write_weights(place / "encoder.safetensors", state))


def test_a_hub_folder_loads_as_the_run_does(run, tmp_path):
    made = kontrast.export(run, "hub", tmp_path / "model", license="CC-BY-4.0")
    picture = next(tiny_run.images().rglob("*.png"))
    theirs, ours = kontrast.load(made.path), kontrast.load(run)
    x = theirs.prepare([picture])
    torch.testing.assert_close(x, Run(run).prepare([picture]), rtol=0, atol=0)
    torch.testing.assert_close(theirs(x), ours(ours.prepare(picture)), rtol=0, atol=0)
    assert made.width == theirs.width == 32 and made.card == made.path / "README.md"
    names = {"README.md", "config.json", "model.safetensors", "probes.json", "recipe.toml", "run.json"}
    assert {path.name for path in made.path.iterdir()} == names
    again = Run(made.path)
    assert again.recipe.training == Run(run).recipe.training and again.info["data"]["images"] == 192
    vectors = kontrast.embed(made.path, tiny_run.images(), tmp_path / "v.npy", device="cpu", say=lambda line: None)
    assert (vectors.images, vectors.width) == (240, 32)
    kontrast.export(run, "hub", made.path)  # in place of the earlier one
    assert json.loads((made.path / "config.json").read_text())["license"] == "unknown"


def test_nothing_of_the_machine_is_published(run, tmp_path):
    private = str(tiny_run.home())
    assert private in (run / "recipe.toml").read_text()
    made = kontrast.export(run, "hub", tmp_path / "model")
    for path in made.path.iterdir():
        content = path.read_bytes().decode("utf-8", "replace")
        assert private not in content and "/home/ada" not in content and str(tmp_path) not in content, path.name
    assert tomllib.loads((made.path / "recipe.toml").read_text())["data"]["source"] == "images"
    open_one = kontrast.export(run, "hub", tmp_path / "open", allow_paths=True)
    assert private in (open_one.path / "recipe.toml").read_text()


def test_the_card_has_accuracies_with_intervals_beside_controls(run, tmp_path):
    card = kontrast.export(run, "hub", tmp_path / "model", license="mit").card.read_text()
    header, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", card, re.DOTALL).groups()
    assert 'license: "mit"' in header.splitlines() and "pipeline_tag: image-feature-extraction" in header
    assert "| probe | this encoder | untrained | test images |" in body
    assert "| knn | 90.0 [85.0, 94.0] | 40.0 [30.0, 50.0] | 48 |" in body
    assert "| linear on new photos | 85.0 [21.5, 100.0] |  | 9 |" in body  # Student's t of 0.8 and 0.9
    for part in ("192 images", "nt-xent", "epochs 2", "batch 32", "Intended use and limits", "mit, for the weights"):
        assert part in body
    assert 'kontrast.load("model")' in body and "timm" not in body


def test_a_card_of_a_run_without_probes_says_so(tmp_path):
    card = kontrast.export(tiny_run.trained(), "hub", tmp_path / "model").card.read_text()
    assert "No probe has measured" in card and "None was given" in card and 'license: "unknown"' in card


def test_a_name_with_markup_stays_text(tmp_path):
    """The header is YAML and the body Markdown: names of others must not end or extend either."""
    place = tiny_run.copy(tmp_path)
    info = json.loads((place / "run.json").read_text())
    info["data"]["name"] = "x\n---\n# <script>alert(1)</script>"
    (place / "run.json").write_text(json.dumps(info))
    card = kontrast.export(place, "hub", tmp_path / "model").card.read_text()
    assert card.count("\n---\n") == 1 and "\\<script" in card and not re.search(r"(?<!\\)<script", card)


def test_torchvision_loads_all_but_the_classifier(run, tmp_path):
    from torchvision.models import get_model

    replace_encoder(run, name="resnet-18", stem="imagenet")
    folder = kontrast.export(run, "torchvision", tmp_path / "folder")
    file = kontrast.export(run, "torchvision", tmp_path / "w.safetensors")
    assert (file.path, file.card) == (tmp_path / "w.safetensors", tmp_path / "w.safetensors.md")
    config = json.loads((tmp_path / "w.safetensors.json").read_text())
    assert config["torchvision"] == {"model": "resnet18", "arguments": {}, "missing": "fc"}
    assert 'load_file("w.safetensors")' in file.card.read_text()
    tensors = load_file(file.path)
    assert all(
        torch.equal(tensor, tensors[key]) for key, tensor in load_file(folder.path / "model.safetensors").items()
    )
    model = get_model("resnet18", weights=None)
    assert model.load_state_dict(tensors, strict=False).missing_keys == ["fc.weight", "fc.bias"]
    model.fc, x = torch.nn.Identity(), torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model.eval()(x), kontrast.load(run)(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoder", [{"name": "resnet-18", "stem": "imagenet"}, {"name": "vit-tiny", "patch": 8}])
def test_timm_loads_the_folder_and_the_file(run, tmp_path, encoder):
    timm = pytest.importorskip("timm", reason="needs the extra kontrast[timm]")
    replace_encoder(run, **encoder)
    folder = kontrast.export(run, "timm", tmp_path / "folder", license="mit")
    ours, x = kontrast.load(run), torch.rand(2, 3, 32, 32)
    model = timm.create_model(f"local-dir:{folder.path}", pretrained=True).eval()
    torch.testing.assert_close(model(x), ours(x), rtol=0, atol=1e-5)
    assert model.num_classes == 0 and model.pretrained_cfg["license"] == "mit"
    given = timm.data.resolve_model_data_config(model)
    assert (
        tuple(given["input_size"]) == (3, 32, 32) and given["crop_pct"] == 1.0 and given["interpolation"] == "bilinear"
    )
    with_classes = timm.create_model(f"local-dir:{folder.path}", pretrained=True, num_classes=3).eval()
    torch.testing.assert_close(with_classes.forward_head(model.forward_features(x), pre_logits=True), ours(x))
    file, config = (
        kontrast.export(run, "timm", tmp_path / "w.safetensors"),
        json.loads((folder.path / "config.json").read_text()),
    )
    overlay = {"file": str(file.path), "num_classes": 0}
    named = {"pretrained": True, "num_classes": 0, "pretrained_cfg_overlay": overlay}
    model = timm.create_model(config["architecture"], **named, **config["model_args"]).eval()
    torch.testing.assert_close(model(x), ours(x), rtol=0, atol=1e-5)
    hub = kontrast.export(run, "hub", tmp_path / "hub")
    model = timm.create_model(f"local-dir:{hub.path}", pretrained=True).eval()
    torch.testing.assert_close(model(x), kontrast.load(hub.path)(x), rtol=0, atol=1e-5)
    assert "local-dir:hub" in hub.card.read_text()


def test_training_starts_from_an_exported_folder(run, tmp_path):
    made = kontrast.export(run, "hub", tmp_path / "model")
    out = tmp_path / "next"
    done = command(
        "pretrain", "digits", "--from", str(made.path), "--no-probes", "--out", str(out), "--device", "cpu", *TINY[:3]
    )
    assert done.returncode == 0, done.stderr
    start = load_file(out / "start.safetensors")
    for name, tensor in load_file(made.path / "model.safetensors").items():
        assert torch.equal(start[f"encoder.{name}"], tensor), name


def test_wrong_arguments_are_one_line(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    cases = [
        (("--format", "timm"), 2, "small-conv can't be exported as a model of timm"),
        (("--format", "hub", "--license", "my own!"), 2, "cc-by-4.0"),
        (("--format", "hub", "--out", tmp_path / "mine"), 2, "diary.txt"),
        (("--format", "hub", "--out", tmp_path / "x.safetensors"), 2, "writes a folder"),
        (("--format", "hub", "--with-head"), 2, "--format safetensors"),
        (("--format", "onnx", "--license", "mit"), 2, "--format timm, torchvision and hub"),
        (("--format", "huh"), 2, "did you mean 'hub'"),
    ]
    for words, code, part in cases:
        one_line(command("export", str(run), *map(str, words)), code, part)
    assert (tmp_path / "mine" / "diary.txt").read_text() == "dear diary" and not (run / "export").exists()


def damage_weights(folder):
    replace = torch.nn.Linear(2, 2).state_dict()
    checkpoints.write_weights(folder / "model.safetensors", replace)


def name_code(folder):
    text = (folder / "recipe.toml").read_text().replace('name = "small-conv"', 'name = "os:system"')
    (folder / "recipe.toml").write_text(text)
    RunFolder(folder).update_info(recipe_sha256=[sha256(text.encode())])


def pickle_weights(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(2)}, folder / "model.bin")


@pytest.mark.parametrize(
    ("change", "error", "part"),
    [
        (damage_weights, CheckpointError, "does not fit the run's recipe"),
        (name_code, UsageError, "unknown encoder 'os:system'"),
        (pickle_weights, CheckpointError, "missing"),
        (lambda folder: (folder / "recipe.toml").unlink(), UsageError, "not a run folder"),
    ],
)
def test_a_folder_of_others_that_is_not_what_it_says(run, tmp_path, change, error, part):
    folder = kontrast.export(run, "hub", tmp_path / "model").path
    change(folder)
    with pytest.raises(error, match=part):
        kontrast.load(folder)


def test_a_dry_run_lists_what_would_be_uploaded(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # it needs no connection, and so no client
    done = command("push", str(run), "ada/digits", "--license", "mit", "--dry-run", "--json")
    tree = json.loads(done.stdout)
    assert done.returncode == 0 and tree["model"] == "hf://ada/digits" and tree["commit"] == ""
    assert set(tree["files"]) == {
        "README.md",
        "config.json",
        "model.safetensors",
        "probes.json",
        "recipe.toml",
        "run.json",
    }
    folder = kontrast.export(run, "hub", tmp_path / "model").path
    (folder / "README.md").write_text("my own words")
    assert kontrast.push(folder, "ada/digits", dry_run=True).files["README.md"] == len("my own words")
    one_line(command("push", str(folder), "ada/digits", "--license", "mit", "--dry-run"), 2, "change its README.md")


def test_push_and_load_say_what_they_need(run, monkeypatch):
    for name in ("digits", "ada/digits/v2", "ada/--x", "../x", "ada/x.git"):
        one_line(command("push", str(run), name), 2, "give owner/name")
    with pytest.raises(UsageError, match="hf://owner/name@revision"):
        kontrast.load("hf://digits")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    one_line(command("push", str(run), "ada/digits"), 6, "huggingface_hub: pip install 'kontrast[hub]'")
    for verb in (["embed", "hf://ada/digits", "x", "--out", "v.npy"], ["pretrain", "--from", "hf://ada/digits"]):
        one_line(command(*verb), 6, "hf:", "pip install 'kontrast[hub]'")
    with pytest.raises(EnvironmentFault, match=r"kontrast\[hub\]"):
        kontrast.load("hf://ada/digits@v1")


def test_push_needs_a_token(run, monkeypatch):
    pytest.importorskip("huggingface_hub", reason="needs the extra kontrast[hub]")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    one_line(command("push", str(run), "ada/digits"), 6, "HF_TOKEN")


def test_the_folder_is_whole_or_absent(run, tmp_path, monkeypatch):
    from kontrast.runs import model_folder

    made = kontrast.export(run, "hub", tmp_path / "model").path
    before = {path.name: path.read_bytes() for path in made.iterdir()}

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_folder, "sync", full)
    with pytest.raises(EnvironmentFault, match="no space left"):
        kontrast.export(run, "hub", made, license="mit")
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]
    shutil.rmtree(made)
