"""A resumed run checks all images that it reads: those for training and those held out for its probes."""

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


def test_a_changed_held_out_file_is_detected_and_named(root, tmp_path):
    run, held = begin(root, tmp_path / "run"), open_data(root, "test").names[2]
    go_on(run)
    picture(999).save(root / held)
    assert f"100 then, 100 now: 1 modified ({held})" in refused(run)
    go_on(run, accept_data_change=True)
    go_on(run)


@pytest.mark.parametrize("every", ["evaluation.every=1", "evaluation.every=0"])
def test_a_file_that_only_moved_between_the_splits_is_not_named(root, tmp_path, every):
    """With fewer files in a class, another file is held out, or one is no longer held out."""
    run, (train, test) = begin(root, tmp_path / "run", every), (open_data(root, split) for split in ("train", "test"))
    (root / test.names[2]).unlink()
    moved = set(open_data(root, "test").names) - set(test.names)
    assert moved, "the boundary did not move: this tests nothing"
    assert f"100 then, 99 now: 1 removed ({test.names[2]});" in refused(run)
    (root / train.names[0]).unlink()
    picture(7).save(root / "class1" / "new.png")
    message = f"1 added (class1/new.png), 2 removed ({train.names[0]}, {test.names[2]});"
    assert f"100 then, 99 now: {message}" in refused(run)


def test_the_folders_train_and_test_may_contain_the_same_names(root, tmp_path):
    place = tmp_path / "parts"
    for part in ("train", "test"):
        shutil.copytree(root, place / part)
    run = begin(place, tmp_path / "run")
    go_on(run)
    (place / "test" / "class0" / "0004.png").unlink()
    assert "200 then, 199 now: 1 removed (test/class0/0004.png);" in refused(run)
    shutil.rmtree(place / "test")
    assert "100 removed (test/class0/0000.png, test/class0/0004.png, test/class0/0008.png, ...);" in refused(run)


def test_images_left_out_by_an_imbalance_are_checked_too(root, tmp_path):
    """The probes read them. Of the images that are kept, more than the names is compared."""
    run = begin(root, tmp_path / "run", "data.imbalance=linear", "training.batch=8")
    go_on(run)
    os.utime(root / "class0" / "0000.png", ns=(7, 7))
    assert "1 modified (class0/0000.png);" in refused(run)


def test_a_run_that_recorded_only_its_train_split_can_be_resumed(root, tmp_path):
    """Older versions wrote such runs."""
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
def test_a_run_on_a_named_set_resumes(tmp_path, more):
    run = begin("digits", tmp_path / "run", *more)
    go_on(run)
    assert not (run / "files.txt.gz").exists()


def test_a_run_on_a_store_resumes_unless_the_store_has_other_images(root, tmp_path):
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


def test_a_probe_warns_about_changed_images(root, tmp_path):
    """If images are added, others are held out, and the encoder was trained on some of these."""
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


def test_files_with_new_dates_stay_in_their_split(root, tmp_path):
    """A copy of a folder has new dates; the names decide which files are held out."""
    run, said = Run(begin(root, tmp_path / "run")), []
    for path in root.rglob("*.png"):
        os.utime(path, (1e9, 1e9))
    probe(run, "knn", device="cpu", say=said.append)
    message = next(line for line in said if "changed" in line)
    assert "modified (class0/" in message and "trained on" not in message
