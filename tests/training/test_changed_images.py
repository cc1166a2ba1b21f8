"""A resumed run watches all the images that it reads: those it trains on, and those held out for its probes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from kontrast.data import file_listing, open_data
from kontrast.errors import DataError
from kontrast.runs.probe import probe
from kontrast.runs.run import Run
from kontrast.training.pretrain import pretrain

from support.made_images import QUICK, folder_of, picture

EVERY = ["evaluation.every=1", "data.test_share=0.2"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KONTRAST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path) -> Path:
    return folder_of(tmp_path / "pictures", 25, classes=4)


def begin(root: Path | str, out: Path, *more: str) -> Path:
    pretrain(root, overrides=[*QUICK, *EVERY, *more], out=out, device="cpu", say=lambda _: None)
    return out


def go_on(run: Path, **options) -> None:
    pretrain(out=run, resume=True, device="cpu", say=lambda _: None, **options)


def refused(run: Path) -> str:
    with pytest.raises(DataError) as caught:
        go_on(run)
    return str(caught.value)


def test_a_held_out_file_that_changed_is_seen_and_named(root, tmp_path):
    run, held = begin(root, tmp_path / "run"), open_data(root, "test").names[2]
    go_on(run)
    picture(999).save(root / held)
    assert f"100 then, 100 now: 1 modified ({held})" in refused(run)
    go_on(run, accept_data_change=True)
    go_on(run)


@pytest.mark.parametrize("every", ["evaluation.every=1", "evaluation.every=0"])
def test_a_file_that_only_moved_over_the_boundary_is_not_named(root, tmp_path, every):
    """Fewer files in a class: another one is held out, or no longer."""
    run, (train, test) = begin(root, tmp_path / "run", every), (open_data(root, split) for split in ("train", "test"))
    (root / test.names[2]).unlink()
    moved = set(open_data(root, "test").names) - set(test.names)
    assert moved, "the boundary did not move: this tests nothing"
    assert f"100 then, 99 now: 1 removed ({test.names[2]});" in refused(run)
    (root / train.names[0]).unlink()
    picture(7).save(root / "class1" / "new.png")
    told = f"1 added (class1/new.png), 2 removed ({train.names[0]}, {test.names[2]});"
    assert f"100 then, 99 now: {told}" in refused(run)


def test_folders_train_and_test_may_hold_the_same_names(root, tmp_path):
    place = tmp_path / "parts"
    for part in ("train", "test"):
        shutil.copytree(root, place / part)
    run = begin(place, tmp_path / "run")
    go_on(run)
    (place / "test" / "class0" / "0004.png").unlink()
    assert "200 then, 199 now: 1 removed (test/class0/0004.png);" in refused(run)
    shutil.rmtree(place / "test")
    assert "100 removed (test/class0/0000.png, test/class0/0004.png, test/class0/0008.png, ...);" in refused(run)


def test_what_an_imbalance_left_out_is_watched_too(root, tmp_path):
    """The probes read it; and of what it took, not the names alone."""
    run = begin(root, tmp_path / "run", "data.imbalance=linear", "training.batch=8")
    go_on(run)
    os.utime(root / "class0" / "0000.png", ns=(7, 7))
    assert "1 modified (class0/0000.png);" in refused(run)


def test_a_run_that_watched_its_train_part_alone_goes_on_as_it_did(root, tmp_path):
    """As an older version wrote it."""
    run, (train, test) = begin(root, tmp_path / "run"), (open_data(root, split) for split in ("train", "test"))
    info = json.loads((run / "run.json").read_text())
    info["data"] = {key: value for key, value in info["data"].items() if not key.startswith("all_")}
    (run / "run.json").write_text(json.dumps(info))
    (run / "files.txt.gz").write_bytes(file_listing(train))
    picture(999).save(root / test.names[2])
    go_on(run)
    picture(999).save(root / train.names[2])
    assert f"{len(train)} then, {len(train)} now: 1 modified ({train.names[2]});" in refused(run)
    go_on(run, accept_data_change=True)
    picture(998).save(root / test.names[2])
    assert f"100 then, 100 now: 1 modified ({test.names[2]});" in refused(run)


@pytest.mark.parametrize("more", [[], ["evaluation.every=0"], ["data.split=test"]])
def test_a_named_set_goes_on(tmp_path, more):
    run = begin("digits", tmp_path / "run", *more)
    go_on(run)
    assert not (run / "files.txt.gz").exists()


def test_a_store_goes_on_and_one_packed_of_other_images_is_told(root, tmp_path):
    from kontrast.data.pack import pack

    pack(root, tmp_path / "store")
    run, held = begin(tmp_path / "store", tmp_path / "run"), open_data(root, "test").names[2]
    picture(999).save(root / held)
    go_on(run)
    pack(root, tmp_path / "store")
    assert f"100 then, 100 now: 1 modified ({held});" in refused(run)


def test_the_held_out_images_are_found_from_any_folder(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = begin("pictures", tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    go_on(run)


def test_a_probe_by_changed_images_tells_it(root, tmp_path):
    """With more images other ones are held out, some of which the encoder was trained on."""
    run, said = Run(begin(root, tmp_path / "run")), []
    probe(run, "knn", device="cpu", say=said.append)
    assert not any("changed" in line for line in said), said
    known = set(open_data(root, "train").names)
    for number in range(20):
        picture(number).save(root / "class1" / f"new{number:02d}.png")
    assert known & set(open_data(root, "test").names), "the boundary did not move: this tests nothing"
    probe(run, "knn", device="cpu", say=said.append)
    words = "since the run was trained: 20 added (class1/new00.png, class1/new01.png, class1/new02.png, ...); some"
    assert any(words in line for line in said), said
    (run.path / "files.txt.gz").write_bytes(b"no listing")
    probe(run, "knn", device="cpu", say=said.append)
    assert said[-1].startswith("the images changed since the run was trained; some")


def test_files_that_only_have_new_dates_move_no_boundary(root, tmp_path):
    """As a copy of the folder has; who is held out goes by names."""
    run, said = Run(begin(root, tmp_path / "run")), []
    for path in root.rglob("*.png"):
        os.utime(path, (1e9, 1e9))
    probe(run, "knn", device="cpu", say=said.append)
    told = next(line for line in said if "changed" in line)
    assert "modified (class0/" in told and "trained on" not in told
