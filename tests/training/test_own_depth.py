"""Runs on images that keep their depth: statistics in the recipe, probes, resuming and starting weights."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import kontrast
from kontrast.config.recipe import to_toml
from kontrast.data import ImageSet
from kontrast.errors import DataError, UsageError
from kontrast.training.own_depth import STATISTICS, value_statistics
from kontrast.training.pretrain import pretrain
from kontrast.training.weight_channels import repeated, with_channels

from support.deep_pictures import bands, write_bands

TINY = {"training": {"epochs": 1, "batch": 8, "max_steps": 2}, "encoder.width": 8, "evaluation.gallery": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bands(tmp_path_factory.mktemp("bands") / "set")


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A run and the lines that it said."""
    said: list[str] = []
    overrides = {**TINY, "data.bands": [5, 1, 2]}
    out = tmp_path_factory.mktemp("runs") / "run"
    return pretrain(folder, overrides=overrides, out=out, device="cpu", say=said.append), said


def test_statistics_are_those_of_the_values():
    values = torch.from_numpy(np.stack([bands(3, seed=i) for i in range(6)])).float()
    values[:, 2] = 7.0  # a constant channel
    found = value_statistics(ImageSet(values, list("abcdef")))
    for c in range(2):
        one = values[:, c].flatten().double().numpy()
        low, high = np.percentile(one, (0.1, 99.9))
        unit = np.clip((one - low) / (high - low), 0, 1)
        expected = low, high, unit.mean(), unit.std()
        np.testing.assert_allclose([column[c] for column in found], expected, rtol=1e-4)
    assert [column[2] for column in found] == [7.0, 8.0, 0.0, 1.0]


def test_a_run_records_what_it_needs(trained):
    """The recipe has the statistics, run.json the type; what is left out is said in one line."""
    run, said = kontrast.Run(trained[0]), trained[1]
    views = run.recipe.views.arguments
    assert run.recipe.data.depth == "own" and run.channels == 5 and run.info["data"]["dtype"] == "uint16"
    assert all(len(views[key]) == 5 for key in ("low", "high", "mean", "std"))
    assert views["gray"] == 0 and views["jitter"][2:] == [0, 0] and views["jitter"][0] > 0
    assert [line for line in said if "left out" in line] == [
        "left out of the views: saturation, hue and grayscale, because the 5 channels are not red, green and blue"
    ]
    assert any(line.startswith("depth: 5 channels of uint16 are kept") for line in said)


def test_probe_embed_and_prepare_see_the_same_images(trained, folder, tmp_path):
    path, _ = trained
    probes = kontrast.probe(path, device="cpu", say=lambda line: None)
    assert {result.features for result in probes} >= {"trained", "pixels"}
    gallery = json.loads((path / "gallery.json").read_text())
    assert gallery["count"] > 0
    kontrast.embed(path, folder, tmp_path / "v.npy", device="cpu", say=lambda line: None)
    vectors, run = np.load(tmp_path / "v.npy"), kontrast.Run(path)
    file = folder / "class1" / "003.npy"
    with torch.no_grad():
        from_file = run.encoder()(run.prepare(str(file)))
        from_pixels = run.encoder()(run.prepare(np.load(file)))
    np.testing.assert_allclose(from_file, from_pixels, rtol=1e-5)
    np.testing.assert_allclose(vectors[15], from_file[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match=r"has torch.uint8 values, the run was trained on uint16"):
        run.prepare(np.zeros((5, 9, 9), np.uint8))


def test_resuming_with_the_recipe_named_again(folder, tmp_path):
    """The recipe on disk has no statistics: the run keeps those that it began with."""
    out, steps = tmp_path / "run", {"training": {"epochs": 2, "batch": 8, "max_steps": 2}, "encoder.width": 8}
    quiet = {"device": "cpu", "say": lambda line: None}
    plain = pretrain(folder, overrides=steps, out=tmp_path / "whole", **quiet)
    recipe = tmp_path / "recipe.toml"
    named = kontrast.Run(plain).recipe
    arguments = {k: v for k, v in named.views.arguments.items() if k not in (*STATISTICS, "gray", "jitter")}
    named = replace(named, data=replace(named.data, depth="auto"), views=replace(named.views, arguments=arguments))
    recipe.write_text(to_toml(named))
    pretrain(recipe=str(recipe), overrides={"training.max_steps": 1}, out=out, **quiet)
    pretrain(recipe=str(recipe), overrides={"training.max_steps": 2}, out=out, resume=True, **quiet)
    same = [torch.equal(a, b) for a, b in zip(weights(plain), weights(out), strict=True)]
    assert all(same)


def weights(run):
    return kontrast.load(run).state_dict().values()


def test_runs_of_earlier_versions_convert_to_8_bits(trained, tmp_path):
    """Their recipe.toml has no data.depth."""
    text = (trained[0] / "recipe.toml").read_text()
    old = tmp_path / "old"
    old.mkdir()
    (old / "recipe.toml").write_text("\n".join(line for line in text.splitlines() if not line.startswith("depth =")))
    (old / "run.json").write_text(json.dumps({"version": 1, "data": {"channels": 3}}))
    run = kontrast.Run(old)
    assert run.recipe.data.depth == "8-bit" and run.limits.form is None


def test_settings_that_do_not_fit(folder, tmp_path):
    quiet = {"out": tmp_path / "run", "device": "cpu", "say": lambda line: None}
    for settings, words in (
        ({"data.random_bits": 4}, "need ordinary pictures: set data.depth=8-bit"),
        ({"data.bands": [6, 1, 2]}, "data.bands has 6: the channels are counted from 1 to 5"),
        ({"data.bands": [1, 2]}, "data.bands must be one or three numbers"),
    ):
        with pytest.raises(UsageError, match=words):
            pretrain(folder, overrides={**TINY, **settings}, **quiet)


def test_weights_for_three_channels_start_five():
    """Channels that repeat the three give the same numbers, scaled by what each filter sees more often."""
    own, pretrained = (torch.nn.Sequential(torch.nn.Conv2d(c, 4, 3, bias=False)) for c in (6, 3))
    tensors, line = with_channels(dict(pretrained.state_dict()), own)
    own.load_state_dict(tensors)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(own(x.repeat(1, 2, 1, 1)), pretrained(x), rtol=1e-4, atol=1e-5)
    assert line == "0.weight takes 3 channels there; repeated for 6"
    assert torch.equal(repeated(pretrained[0].weight, 5)[:, 3], pretrained[0].weight[:, 0] * 0.6)
    assert torch.equal(repeated(pretrained[0].weight, 1)[:, 0], pretrained[0].weight.sum(1))
    assert with_channels(dict(own.state_dict()), own)[1] == ""
