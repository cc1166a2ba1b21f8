"""Recipes and overrides that are nonsense, deeply nested or huge: exit 2, one line with the key, no run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_line import kontrast, one_line


def refused(tmp_path: Path, *argv: str, words: tuple[str, ...] = (), code: int = 2) -> None:
    out = tmp_path / "run"
    one_line(kontrast("pretrain", *argv, "--device", "cpu", "--out", str(out)), code, *words)
    assert not out.exists()


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.epoch=3", ("training.epoch", "'epochs'")),
        ("trainig.epochs=3", ("trainig", "'training'")),
        ("training.epochs=1.5", ("training.epochs", "whole number")),
        ("training.epochs=true", ("training.epochs",)),
        ("training.epochs=[3]", ("training.epochs",)),
        ("training.epochs=2024-01-01", ("training.epochs",)),
        ("training.epochs=-1", ("training.epochs", "at least 0")),
        ("training.epochs=99999999999999999999999", ("training.epochs", "2^63")),
        ("training.lr=nan", ("training.lr", "finite")),
        ("training.lr=-inf", ("training.lr", "finite")),
        ("training.lr=-1", ("training.lr", "at least 0")),
        ("training.lr=1" + "0" * 400, ("training.lr", "2^63")),
        ("training.lr=1\n[training]\nepochs=1", ("training.lr",)),
        ("training.milestones=[1,nan]", ("training.milestones", "finite")),
        ("training.batch=0", ("training.batch", "at least 2")),
        ("training.batch=1", ("training.batch", "at least 2")),
        ("seed=-1", ("seed",)),
        ("seed=" + "9" * 50, ("seed", "2^63")),
        ("seed.x=1", ("seed",)),
        ("objective.temperature=0", ("temperature",)),
        ("objective.temperature=-0.1", ("temperature",)),
        ("objective.temperature=nan", ("objective.temperature", "finite")),
        ("objective.temperature=cold", ("temperature",)),
        ("objective.temperature=[0.1]", ("temperature",)),
        ("objective.temperature=2024-01-01", ("objective.temperature",)),
        ("objective.temperature=true", ("temperature",)),
        ("objective.reduction=sum()", ("reduction",)),
        ("objective=3", ("objective", "table")),
        ("objective.name=3", ("objective.name", "string")),
        ("objective.normalize=maybe", ("normalize",)),
        ("views.size=0", ("views.size",)),
        ("views.count=0", ("views.count",)),
        ("views.crop_scale=[0.1,nan]", ("views.crop_scale", "finite")),
        ("views.crop_scale=[2,1]", ("crop_scale",)),
        ("views.crop_scale=big", ("crop_scale",)),
        ("views.flip=3", ("flip",)),
        ("views.mean=[1,2]", ("mean",)),
        ("encoder.width=0", ("width",)),
        ("encoder.width=-16", ("width",)),
        ("encoder.width=wide", ("width",)),
        ("encoder.width=1.5", ("width",)),
        ("head.outputs=0", ("outputs",)),
        ("head.outputs=many", ("outputs",)),
        ("head.layers=[1]", ("layers",)),
        ("teacher.momentum=2", ("teacher.momentum", "at most 1")),
        ("bank.size=0", ("bank.size",)),
        ("data.max_bad=1.5", ("data.max_bad",)),
        ("data.imbalance=some", ("data.imbalance", "linear")),
        ("data.follow_links=some", ("data.follow_links", "true or false")),
        ("=3", ("key.path=value",)),
        (".=3", ("key.path=value",)),
        ("training..lr=3", ("key.path=value",)),
        (".".join("a" * 5000) + "=1", ("key.path=value",)),
        ("objective.x=" + "[" * 300 + "]" * 300, ("objective.x", "deep")),
        ("objective.x=" + "[" * 100_000, ("x",)),
        ("title=" + "x" * 2_000_000, ("title",)),
    ],
    ids=lambda value: value[:40].replace("\n", " ") if isinstance(value, str) else "",
)
def test_invalid_override(tmp_path, override, words):
    """Exit 2 and one line with the key, what is allowed and the nearest name; no folder is left."""
    refused(tmp_path, override, words=words)


DEEP = 100_000


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = " + "[" * DEEP + "]" * DEEP, ("deep",)),
        ("x = " + "{ a = " * DEEP + "1" + " }" * DEEP, ("deep",)),
        ("a" + ".a" * DEEP + " = 1", ("deep",)),
        ("[a" + ".a" * DEEP + "]", ("deep",)),
        ("[[a]]\n" * 50_000, ("'a'",)),
        ("x = 1\n" * 2, ("TOML",)),
        ("\x00", ("TOML",)),
        ("title = '" + "x" * 10_000_000 + "'", ("mine.toml",)),
        ("base = 'quickstart'\nbase = 'folder'", ("TOML",)),
        ("base = 3", ("base",)),
        ("base = 'no-such'", ("no-such",)),
        ("seed = 0x" + "f" * 100_000, ("seed", "2^63")),
        ("seed = " + "1" * 100_000, ("digits",)),
        ("[training]\nlr = 1e999", ("training.lr", "finite")),
        ("[training]\nepochs = 2024-01-01T00:00:00", ("training.epochs",)),
        ("[objective]\nname = 'nt-xent'\ntemperature = { a = 1 }", ("temperature",)),
    ],
    ids=lambda value: value[:25].replace("\n", " ") if isinstance(value, str) else "",
)
def test_invalid_recipe_file(tmp_path, text, words):
    """Exit 2 and one line, even for 100,000 nested brackets or ten megabytes."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    refused(tmp_path, "--recipe", str(path), words=words)


@pytest.mark.fault(35)
def test_recipe_that_is_not_a_text_file(tmp_path):
    """Exit 2 names bytes, folders, devices and circular bases."""
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    refused(tmp_path, "--recipe", str(tmp_path / "bytes.toml"), words=("UTF-8",))
    (tmp_path / "folder.toml").mkdir()
    refused(tmp_path, "--recipe", str(tmp_path / "folder.toml"), words=("folder.toml",))
    refused(tmp_path, "--recipe", "/dev/zero", words=("/dev/zero",))
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(f'base = "{second}"')
    second.write_text(f'base = "{first}"')
    refused(tmp_path, "--recipe", str(first), words=("base",))


@pytest.mark.fault(35)
def test_hostile_recipe_in_a_run_folder(tmp_path):
    """A stored recipe with deep nesting or megabytes of text is refused by every command; the report shows the rest."""
    from support import tiny_run

    run = tiny_run.copy(tmp_path)
    (run / "run.json").write_text((run / "run.json").read_text().replace("recipe_sha256", "before"))
    for text in ("x = " + "[" * 100_000, "title = '" + "x" * 10_000_000 + "'", "\x00", "x = 3", "[training]\nlr = nan"):
        (run / "recipe.toml").write_text(text)
        done = kontrast("probe", str(run), "--device", "cpu")
        assert done.returncode in (2, 4), done.stderr
        one_line(done, done.returncode, "recipe.toml")
        done = kontrast("report", str(run), "--out", str(tmp_path / "page.html"))
        assert done.returncode == 0 and (tmp_path / "page.html").stat().st_size < 30_000_000, done.stderr
