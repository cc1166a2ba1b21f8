"""Training that starts from existing weights: runs, safetensors and state dicts, their names, their settings."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import kontrast
from kontrast import networks
from kontrast.config.recipe import read_recipe
from kontrast.errors import CheckpointError, UsageError
from kontrast.training import checkpoints
from kontrast.training.build import build_learner
from kontrast.training.starting_weights import guess_encoder, load_start, open_source
from kontrast.training.weight_files import read_tensors
from kontrast.training.weight_matching import fits, match_weights

from support import tiny_run

SHORT = {"training": {"epochs": 1, "batch": 32, "max_steps": 2}, "evaluation.every": 0}


def begin(tmp_path, weights, recipe="quickstart", lines=None, **overrides):
    """Train for two steps from these weights and return the run."""
    say = (lambda line: None) if lines is None else lines.append
    settings = {key: value for key, value in {**SHORT, **overrides}.items() if value is not None}
    return kontrast.pretrain(
        tiny_run.images(), recipe, from_=weights, out=tmp_path / "new", device="cpu", say=say, **settings
    )


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(1)
    return networks.encoder("resnet-18", size=32, stem="imagenet")


def test_run_gives_its_encoder_and_its_settings_adapt(tmp_path):
    """Without a recipe the encoder, the view size and the normalization are the run's; rate and warm-up are smaller."""
    lines: list[str] = []
    run = begin(tmp_path, tiny_run.trained(), None, lines)
    recipe, folder_rate = run.recipe, 0.3
    assert (recipe.encoder.name, recipe.encoder.arguments["width"], recipe.views.size) == ("small-conv", 32, 32)
    assert 0 < recipe.training.lr < folder_rate and recipe.training.warmup < 1
    assert recipe.start.weights == str(tiny_run.trained())
    text = "\n".join(lines)
    assert "learning rate 0.3 ->" in text and "start: loaded: 24 tensors" in text and "start: new: head" in text
    assert run.info["start"]["left out"] == "nothing"
    start, trained = run.before_training().encoder.state_dict(), kontrast.load(tiny_run.trained()).state_dict()
    assert all(torch.equal(start[name], trained[name]) for name in trained)
    random = run.untrained().encoder.state_dict()
    assert not torch.equal(start["layers.0.weight"], random["layers.0.weight"])


def test_user_decides_over_the_run(tmp_path):
    """A named rate stays, and a named encoder replaces that of the run, whose weights then do not fit."""
    run = begin(tmp_path, tiny_run.trained(), None, training={"lr": 0.25, "warmup": 0, "max_steps": 2, "batch": 32})
    assert (run.recipe.training.lr, run.recipe.training.warmup) == (0.25, 0)
    with pytest.raises(CheckpointError, match=r"layers.0.weight has shape \[4, 3, 3, 3\] there and \[8, 3, 3, 3\]"):
        begin(tmp_path / "other", tiny_run.trained(), None, **{"encoder.name": "small-conv", "encoder.width": 64})
    assert not (tmp_path / "other" / "new").exists()


def test_recipe_with_its_own_start_keeps_its_rate(tmp_path):
    """A recipe that names the weights has chosen its rate for them."""
    text = f"base = 'quickstart'\nstart = {{ weights = '{tiny_run.trained()}' }}\n"
    text += "encoder = { name = 'small-conv', width = 32 }"
    (tmp_path / "own.toml").write_text(text)
    run = begin(tmp_path, None, str(tmp_path / "own.toml"))
    assert run.recipe.training.lr == 0.05 and run.recipe.start.weights


@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "model.encoder.", "state_dict.module.encoder_q."])
def test_prefixes_and_classifiers(encoder, prefix):
    """Prefixes are stripped; classifier and projector are left out, and so is the teacher's second copy."""
    tensors = {prefix + name: tensor for name, tensor in encoder.state_dict().items()}
    tensors |= {f"{prefix}fc.weight": torch.zeros(10, 512), "projector.0.weight": torch.zeros(2, 2)}
    if prefix:
        tensors |= {f"target.{name}": torch.zeros_like(tensor) for name, tensor in encoder.state_dict().items()}
    found = match_weights(encoder, tensors, "file", "resnet-18")
    assert found.prefix == prefix and not found.new
    assert all(torch.equal(found.loaded[name], tensor) for name, tensor in encoder.state_dict().items())
    assert f"{prefix}fc.weight" in found.left_out and "projector.0.weight" in found.left_out


@pytest.mark.parametrize(
    ("taken", "other"),
    [("encoder_q", "encoder_k"), ("teacher.backbone", "student.backbone"), ("online_network", "target_network")],
)
def test_of_two_copies_the_one_to_evaluate_is_taken(encoder, taken, other):
    """Whatever the order of the file, which safetensors does not keep."""
    state = encoder.state_dict()
    for first, second in ((taken, other), (other, taken)):
        tensors = {f"{prefix}.{name}": tensor for prefix in (first, second) for name, tensor in state.items()}
        found = match_weights(encoder, tensors, "file", "resnet-18")
        assert found.prefix == f"{taken}." and found.copies == [f"{other}."]


def test_a_teacher_of_another_shape_is_not_taken():
    student, teacher = (networks.encoder("small-conv", size=32, width=width) for width in (8, 16))
    tensors = {f"student.{name}": tensor for name, tensor in student.state_dict().items()}
    tensors |= {f"teacher.{name}": tensor for name, tensor in teacher.state_dict().items()}
    found = match_weights(student, tensors, "file", "small-conv")
    assert found.prefix == "student." and not found.copies


def test_a_run_says_which_copy_it_took(tmp_path):
    state = kontrast.load(tiny_run.trained()).state_dict()
    tensors = {
        f"{prefix}.{name}": tensor.clone() for prefix in ("student", "teacher") for name, tensor in state.items()
    }
    save_file(tensors, tmp_path / "dino.safetensors")
    lines: list[str] = []
    begin(tmp_path, tmp_path / "dino.safetensors", lines=lines, **{"encoder.name": "small-conv", "encoder.width": 32})
    assert "start: copies: took the one after 'teacher.', not after 'student.'" in lines


def test_values_are_refused_by_their_own_names(encoder):
    """The weights fit, but a network with them gives NaN."""
    tensors = dict(encoder.state_dict())
    tensors["layer1.0.bn1.running_var"] = torch.full((64,), -1.0)
    with pytest.raises(CheckpointError, match=r"^file: layer1\.0\.bn1\.running_var holds a negative variance"):
        match_weights(encoder, tensors, "file", "resnet-18")
    tensors["conv1.weight"] = torch.full((64, 3, 7, 7), torch.nan)
    assert fits(encoder, tensors)
    with pytest.raises(CheckpointError, match=r"^file: conv1\.weight holds NaN or infinity"):
        match_weights(encoder, tensors, "file", "resnet-18")


def test_old_files_lack_counters(encoder):
    tensors = {n: t.half() for n, t in encoder.state_dict().items() if not n.endswith("num_batches_tracked")}
    found = match_weights(encoder, tensors, "file", "resnet-18")
    assert found.new == [n for n in encoder.state_dict() if n.endswith("num_batches_tracked")]
    assert found.loaded["conv1.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("resnet-34", {"stem": "imagenet"}, r"layer1.2.conv1.weight has shape \[64, 64, 3, 3\] there and is missing"),
        (
            "resnet-50",
            {"stem": "imagenet"},
            r"layer1.0.conv1.weight has shape \[64, 64, 1, 1\] there and \[64, 64, 3, 3\]",
        ),
        ("resnet-18", {"stem": "cifar"}, r"conv1.weight has shape \[64, 3, 3, 3\] there and \[64, 3, 7, 7\]"),
        (
            "small-conv",
            {},
            r"it has no conv1.weight, whose shape in resnet-18 is \[64, 3, 7, 7\] .*layers.0.weight \[32,",
        ),
    ],
)
def test_other_architectures_are_refused(encoder, name, settings, problem):
    """The first tensor that does not fit is named, with both shapes."""
    other = networks.encoder(name, size=32, **settings)
    with pytest.raises(CheckpointError, match=f"file does not fit resnet-18: {problem}"):
        match_weights(encoder, other.state_dict(), "file", "resnet-18")


@pytest.mark.parametrize(
    ("name", "settings", "size"),
    [("resnet-18", {"stem": "imagenet"}, 0), ("small-resnet", {"stem": "small"}, 0), ("vit-tiny", {}, 32)],
)
def test_encoder_is_recognized_by_its_shapes(name, settings, size):
    network = networks.encoder(name, size=32, **settings)
    assert guess_encoder(network.state_dict()) == ({"name": name, **settings}, size)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_encoder_is_recognized_in_any_order(channels):
    """The layer that takes the images need not come first."""
    network = networks.encoder("resnet-18", size=32, stem="cifar", channels=channels)
    backwards = dict(reversed(network.state_dict().items()))
    assert guess_encoder(backwards) == ({"name": "resnet-18", "stem": "cifar"}, 0)


def test_tensors_are_read_in_the_order_of_their_names(tmp_path):
    """safetensors gives them in another order in each process."""
    names = [f"w{n:02}" for n in range(32)]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "w.safetensors")
    assert list(read_tensors(tmp_path / "w.safetensors")) == names


def test_a_file_that_fits_no_encoder_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("kontrast.training.starting_weights.ENCODERS", ())  # building all takes seconds
    save_file({"stem.0.weight": torch.zeros(5, 3, 3, 3)}, tmp_path / "w.safetensors")
    problem = r"fits no encoder of kontrast \(its first tensor is stem.0.weight \[5, 3, 3, 3\]\): name one with encoder"
    with pytest.raises(CheckpointError, match=problem):
        open_source(str(tmp_path / "w.safetensors"))


def test_torchvision_state_dict(tmp_path):
    """A .pth file of torchvision's ResNet-18 is read without unpickling; the outputs are torchvision's."""
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    theirs = models.resnet18(weights=None, num_classes=3)
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{n}": t for n, t in theirs.state_dict().items()}}, tmp_path / "r.pth"
    )
    lines: list[str] = []
    short = {"training": {"epochs": 1, "batch": 8, "max_steps": 1}}
    run = begin(tmp_path, tmp_path / "r.pth", None, lines, **{"views.size": 32, **short})
    assert (run.recipe.encoder.name, run.recipe.encoder.arguments["stem"]) == ("resnet-18", "imagenet")
    assert any("left out: state_dict.module.fc.weight" in line for line in lines)
    theirs.fc = torch.nn.Identity()
    images = torch.randn(2, 3, 32, 32)
    ours = run.before_training().encoder.eval()
    torch.testing.assert_close(ours(images), theirs.eval()(images))


def test_exported_encoder_names_itself(tmp_path):
    """The card in the header of an exported file gives encoder, size and normalization."""
    path = tmp_path / "encoder.safetensors"
    kontrast.export(tiny_run.trained(), out=path)
    source = open_source(str(path))
    assert source.encoder == {"name": "small-conv", "width": 32} and source.views["size"] == 32
    assert begin(tmp_path, path, None).recipe.encoder.arguments["width"] == 32


def test_timm_state_dict():
    """A state dict of a timm model fits the encoder timm:NAME, without its classifier."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet10t", num_classes=7)
    found = match_weights(networks.encoder("timm:resnet10t", size=32), model.state_dict(), "file", "timm:resnet10t")
    assert found.left_out == ["fc.weight", "fc.bias"] and not found.new


def test_teacher_and_head_start_there_too(tmp_path):
    """The teacher has the student's weights, and with start.head the head of the newest checkpoint as well."""
    run = begin(tmp_path, tiny_run.trained(), None, **{"start.head": True, "training.batch": 32})
    tensors = checkpoints.newest(tiny_run.trained() / "checkpoints")[0]
    recipe = read_recipe({
        "encoder": {"name": "small-conv", "width": 32}, "objective": {"name": "info-nce"}, "teacher": {"momentum": 0.9},
        "start": {"weights": "unused"},
    })  # fmt: skip
    learner = build_learner(recipe, 3, torch.device("cpu"))
    load_start(run.folder, learner)
    for part in (learner.student, learner.teacher.module):
        state = part.state_dict()
        for name in ("encoder.layers.0.weight", "head.network.0.weight"):
            known = tensors.get(f"learner.student.{name}")
            if known is not None:
                assert torch.equal(state[name], known)
    heads = checkpoints.under("learner.student.head", tensors)
    assert heads and all(torch.equal(learner.teacher.module.head.state_dict()[n], t) for n, t in heads.items())


def test_frozen_stages_do_not_change(tmp_path):
    run = begin(tmp_path, tiny_run.trained(), None, **{"start.frozen_stages": 2})
    start, end = run.before_training().encoder.state_dict(), run.encoder().state_dict()
    changed = {int(name.split(".")[1]) for name in start if not torch.equal(start[name], end[name])}
    assert changed and min(changed) == 6  # after two convolutions, each with its norm and its ReLU
    with pytest.raises(UsageError, match="at most 3 can be frozen"):
        begin(tmp_path / "all", tiny_run.trained(), None, **{"start.frozen_stages": 4})


def test_resumed_run_needs_only_its_folder(tmp_path):
    """Resuming before the first checkpoint starts from start.safetensors and ends with the same bits."""
    from kontrast.training.loop import Loop

    source = tiny_run.copy(tmp_path)
    settings = {"evaluation": {"every": 1, "k": 5}, "training": {"epochs": 1, "batch": 32}}
    whole = begin(tmp_path / "whole", source, None, **settings)
    run, original = tmp_path / "cut" / "new", Loop.run

    def cut(self, *given):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "run", cut)
        with pytest.raises(KeyboardInterrupt):
            begin(tmp_path / "cut", source, None, **settings)
    assert Loop.run is original and (run / "recipe.toml").exists()
    source.rename(tmp_path / "gone")
    kontrast.pretrain(out=run, resume=True, device="cpu", say=lambda line: None)
    assert (run / "encoder.safetensors").read_bytes() == (whole.path / "encoder.safetensors").read_bytes()
    assert (run / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 and "knn" in first


def test_probe_and_page_show_the_start(tmp_path):
    run = begin(tmp_path, tiny_run.trained(), None)
    results = kontrast.probe(run, "knn", device="cpu", say=lambda line: None)
    assert [r.features for r in results] == ["trained", "starting weights", "untrained", "pixels"]
    before = kontrast.probe(tiny_run.copy(tmp_path), "knn", device="cpu", say=lambda line: None)
    assert results[1].accuracy == before[0].accuracy
    assert "starting weights" in str(results).splitlines()[0]
    page = kontrast.report(run).read_text()
    assert "for the weights that it started from" in page and "24 tensors" in page


def test_start_needs_weights_and_a_head_needs_a_run(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match=r"start\.weights"):
        begin(tmp_path, None, **{"start.frozen_stages": 1})
    with pytest.raises(UsageError, match="needs a run folder"):
        begin(tmp_path, tmp_path / "x.safetensors", **{"start.head": True})
    with pytest.raises(UsageError, match="neither file nor folder"):
        begin(tmp_path, tmp_path / "absent.pt")


def test_nested_state_dicts(tmp_path):
    torch.save({"a": {"b": torch.ones(2)}, "step": 3, "c": torch.zeros(1), "list": [torch.ones(1)]}, tmp_path / "n.pt")
    assert {name: tensor.tolist() for name, tensor in read_tensors(tmp_path / "n.pt").items()} == {
        "a.b": [1, 1],
        "c": [0],
    }
    save_file({"w": torch.ones(2)}, tmp_path / "n.safetensors")
    assert read_tensors(tmp_path / "n.safetensors").keys() == load_file(tmp_path / "n.safetensors").keys()
