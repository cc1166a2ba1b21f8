"""Push and load through huggingface_hub, against a stand-in of the hub's HTTP interface."""

from __future__ import annotations

import json

import pytest
import torch

import kontrast
from kontrast.errors import CheckpointError, EnvironmentFault, UsageError

from support import tiny_run
from support.command_line import TINY, one_line
from support.command_line import kontrast as command
from support.stand_in_hub import TOKEN, Repository, stand_in_hub

pytestmark = pytest.mark.integration


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with no models, which the client takes for the public one, with an empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra kontrast[hub]")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with stand_in_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_pushed_run_loads_as_itself(hub, tmp_path):
    run, x = tiny_run.trained(), torch.rand(2, 3, 32, 32)
    done = command("push", str(run), "ada/digits", "--license", "mit", "--json")
    assert done.returncode == 0, done.stderr
    tree, repository = json.loads(done.stdout), hub.repositories["ada/digits"]
    assert tree["commit"] == repository.refs["main"] and tree["url"].endswith(f"/ada/digits/commit/{tree['commit']}")
    assert any(line.startswith("PUT /lfs/") for line in hub.requests)  # the weights are a large file
    files = repository.files("main")[1]
    assert {name: len(content) for name, content in files.items() if name != ".gitattributes"} == tree["files"]
    assert 'kontrast.load("hf://ada/digits")' in files["README.md"].decode()
    loaded = kontrast.load("hf://ada/digits")
    torch.testing.assert_close(loaded(x), kontrast.load(run)(x), rtol=0, atol=0)
    picture = next(tiny_run.images().rglob("*.png"))
    torch.testing.assert_close(loaded.prepare(picture), kontrast.Run(run).prepare(picture), rtol=0, atol=0)
    words = [str(tiny_run.images()), "--out", str(tmp_path / "v.npy"), "--device", "cpu"]
    done = command("embed", "hf://ada/digits", *words)
    assert done.returncode == 0, done.stderr
    command("push", str(run), "ada/digits", "--license", "apache-2.0", "--message", "Say the license")
    assert len(repository.commits) == 3 and b"apache-2.0" in repository.files("main")[1]["README.md"]
    first = kontrast.Run(f"hf://ada/digits@{tree['commit']}")
    assert b'license: "mit"' in (first.path / "README.md").read_bytes()
    assert not repository.private


def test_a_pushed_vit_loads_in_timm_from_the_hub(hub, tmp_path, monkeypatch):
    timm = pytest.importorskip("timm", reason="needs the extra kontrast[timm]")
    out, x = tmp_path / "vit", torch.rand(2, 3, 32, 32)
    tiny = {"training": {"max_steps": 1, "batch": 16}, "encoder": {"name": "vit-tiny", "patch": 16}}
    kontrast.pretrain("digits", out=out, device="cpu", say=lambda line: None, evaluation={"every": 0}, **tiny)
    kontrast.push(out, "ada/vit", private=True)
    from huggingface_hub import constants

    address = "{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # timm's client reads the variable when it is imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{address}")
    model = timm.create_model("hf-hub:ada/vit", pretrained=True).eval()
    torch.testing.assert_close(model(x), kontrast.load("hf://ada/vit")(x), rtol=0, atol=1e-5)
    assert hub.repositories["ada/vit"].private


def test_training_starts_from_a_model_on_the_hub(hub, tmp_path):
    from safetensors.torch import load_file

    kontrast.push(tiny_run.trained(), "ada/digits")
    words = ["--from", "hf://ada/digits", "--no-probes", "--out", str(tmp_path / "run"), "--device", "cpu"]
    done = command("pretrain", "digits", *words, *TINY[:3])
    assert done.returncode == 0 and "start: hf://ada/digits (a run of nt-xent" in done.stderr, done.stderr
    start, ours = load_file(tmp_path / "run" / "start.safetensors"), kontrast.load(tiny_run.trained()).state_dict()
    assert all(torch.equal(start[f"encoder.{name}"], tensor) for name, tensor in ours.items())
    assert json.loads((tmp_path / "run" / "run.json").read_text())["start"]["weights"] == "hf://ada/digits"
    hub.fail = 503  # a resumed run needs its folder alone
    done = command("pretrain", "--resume", "--no-probes", "--out", str(tmp_path / "run"), "--device", "cpu")
    assert done.returncode == 0, done.stderr


def test_what_the_hub_answers_becomes_one_line(hub, tmp_path, monkeypatch):
    run, vectors = str(tiny_run.trained()), str(tmp_path / "v.npy")

    def embed(place):
        return command("embed", place, str(tiny_run.images()), "--out", vectors)

    kontrast.push(run, "ada/digits", private=True)
    one_line(embed("hf://ada/nothing"), 2, "hf://ada/nothing does not exist")
    one_line(embed("hf://ada/digits@v9"), 2, "no revision 'v9'")
    one_line(command("push", run, "bob/digits"), 6, "HF_TOKEN has no right")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    one_line(embed("hf://ada/digits@main"), 6, "does not accept the token in HF_TOKEN")
    one_line(command("push", run, "ada/digits"), 6, "does not accept the token in HF_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    one_line(embed("hf://ada/digits"), 6, "is private", "set HF_TOKEN")
    one_line(command("push", run, "ada/digits"), 6, "needs a token in the variable HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.fail = 400
    one_line(command("push", run, "ada/digits"), 6, "the hub answered 400")


def test_without_a_connection_only_the_cache_is_read(hub, monkeypatch):
    kontrast.push(tiny_run.trained(), "ada/digits")
    before = kontrast.load("hf://ada/digits").state_dict()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    again = kontrast.load("hf://ada/digits").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in before.items())
    with pytest.raises(EnvironmentFault, match=r"can not be reached.*check the network"):
        kontrast.load("hf://ada/other")


def test_only_models_of_kontrast_are_loaded_and_nothing_else_is_downloaded(hub, tmp_path):
    pickled = {"model.safetensors": b"", "pytorch_model.bin": b"code", "config.json": b"{}"}
    hub.repositories["ada/other"] = Repository()
    hub.repositories["ada/other"].commit(pickled)
    with pytest.raises(CheckpointError, match=r"has no recipe\.toml.*timm.create_model\('hf-hub:ada/other'\)"):
        kontrast.load("hf://ada/other")
    assert not any("pytorch_model.bin" in line for line in hub.requests)
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_a_model_that_was_changed_on_the_hub_is_refused(hub):
    kontrast.push(tiny_run.trained(), "ada/digits")
    repository = hub.repositories["ada/digits"]
    files = dict(repository.files("main")[1])
    recipe = files["recipe.toml"].replace(b'name = "small-conv"', b'name = "os:system"')
    repository.commit(files | {"recipe.toml": recipe})
    with pytest.raises(CheckpointError, match="was edited"):
        kontrast.load("hf://ada/digits")
    info = json.loads(files["run.json"])
    del info["recipe_sha256"]
    repository.commit(files | {"recipe.toml": recipe, "run.json": json.dumps(info).encode()})
    with pytest.raises(UsageError, match="unknown encoder 'os:system'"):
        kontrast.load("hf://ada/digits")
    other = recipe.replace(b'name = "os:system"', b'name = "resnet-18"').replace(b"width = 32", b"")
    repository.commit(files | {"recipe.toml": other, "run.json": json.dumps(info).encode()})
    with pytest.raises(CheckpointError, match="does not fit the run's recipe"):
        kontrast.load("hf://ada/digits")
