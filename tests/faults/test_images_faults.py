"""Images that are no images, are damaged, huge, deep, turned or gone: skipped and named, or read as they are meant."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kontrast.data import open_data

from support.command_line import kontrast, one_line
from support.commands import as_nobody
from support.made_images import FORMATS, QUICK, encoded, folder_of, gif_bomb, picture, png_bomb, tiff_bomb, write_tar
from support.tiny_run import copy, images


def bad_lines(run) -> dict[str, str]:
    return {r["name"]: r["reason"] for r in map(json.loads, (run / "bad.jsonl").read_text().splitlines())}


def pretrain(root, out, *more: str):
    return kontrast("pretrain", str(root), *QUICK, *more, "--no-probes", "--device", "cpu", "--out", str(out))


@pytest.mark.fault(11)
def test_damaged_files_of_six_formats_are_skipped_and_listed(tmp_path):
    """How many were skipped and the first names are seen; the run trains on the rest, bad.jsonl has each reason."""
    root = folder_of(tmp_path / "pictures", 240)
    for number, (form, suffix) in enumerate(FORMATS.items()):
        content = encoded(picture(number, 64), form)
        (root / f"cut-{form}{suffix}").write_bytes(content[: len(content) // 2])
        (root / f"stub-{form}{suffix}").write_bytes(content[:20])
    done = pretrain(root, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "skipped 12 of 252 images" in done.stderr
    reasons = bad_lines(tmp_path / "run")
    assert set(reasons) == {f"{kind}-{form}{suffix}" for kind in ("cut", "stub") for form, suffix in FORMATS.items()}
    assert all(reasons.values())
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"]["skipped"] == 12


@pytest.mark.fault(11)
def test_over_a_twentieth_bad_stops_before_anything_is_written(tmp_path):
    """Exit 3 with counts, the first names and the setting that allows more; no run folder is left behind."""
    root = folder_of(tmp_path / "pictures", 40)
    for number in range(3):
        (root / f"broken{number}.jpg").write_bytes(encoded(picture(number, 64), "JPEG")[:200])
    done = pretrain(root, tmp_path / "run")
    one_line(done, 3, "3 of 43 images", "over the 5% allowed", "broken0.jpg", "--max-bad 0.07", "data.max_bad=0.07")
    assert not (tmp_path / "run").exists()
    assert pretrain(root, tmp_path / "run", "data.max_bad=0.07").returncode == 0
    pack = ("pack", str(root), str(tmp_path / "store"))
    one_line(kontrast(*pack), 3, "3 of 43 images", "--max-bad 0.07")
    assert kontrast(*pack, "--max-bad", "0.07").returncode == 0


@pytest.mark.fault(11)
def test_a_probe_on_other_images_takes_its_own_share_of_bad_ones(tmp_path):
    """The run's own images are sound, the ones to probe on are not all: exit 3, and --max-bad lets it go on."""
    other = tmp_path / "labelled"
    shutil.copytree(images(), other)
    for number in range(20):
        (other / "0" / f"broken{number}.png").write_bytes(b"nothing")
    probe = ("probe", str(copy(tmp_path)), "knn", "--data", str(other), "--device", "cpu")
    one_line(kontrast(*probe), 3, "over the 5% allowed", "--max-bad")
    done = kontrast(*probe, "--max-bad", "0.1")
    told = [int(n) for n in re.findall(r"skipped (\d+) of \d+ (?:train|test) images: 0/broken", done.stderr)]
    assert done.returncode == 0 and sum(told) == 20 and len(told) == 2


def spoil(root: Path, split: str, count: int) -> list[str]:
    names = open_data(root, split).names[:count]
    for name in names:
        (root / name).write_bytes(b"nothing")
    return names


def tar_of(path: Path, bad) -> Path:
    """200 pictures of two classes, those named in `bad` no pictures."""
    members = []
    for number in range(200):
        content = b"nothing" if f"{number}.png" in bad else encoded(picture(number), "PNG")
        members += [(f"{number}.png", content), (f"{number}.cls", b"%d" % (number % 2))]
    return write_tar(path, members)


@pytest.mark.fault(11)
def test_chance_may_put_all_that_is_bad_into_the_held_out_part(tmp_path):
    """3 of 200 images are bad, all held out, where they are 3 of 40: they are skipped, in folders, stores and tars."""
    root = folder_of(tmp_path / "pictures", 100, classes=2)
    spoil(root, "test", 3)
    done = kontrast(
        "pretrain", str(root), *QUICK, "evaluation.every=1", "--device", "cpu", "--out", str(tmp_path / "r")
    )
    assert done.returncode == 0 and "skipped 3 of 40 test images" in done.stderr, done.stderr
    assert kontrast("pack", str(root), str(tmp_path / "store")).returncode == 0
    tar = tar_of(tmp_path / "pictures.tar", ())
    tar_of(tar, [name.split("/")[-1] for name in open_data(tar, "test").names[:3]])
    for more in ((), ("data.pack=false",)):
        argv = ("pretrain", str(tar), *QUICK, "evaluation.every=1", "--device", "cpu", *more)
        done = kontrast(*argv, "--out", str(tmp_path / f"tar{len(more)}"))
        assert done.returncode == 0 and (more or "skipped 3 of 40 test images" in done.stderr), done.stderr


@pytest.mark.fault(11)
def test_bad_images_of_both_parts_are_judged_together_before_a_run_begins(tmp_path):
    """14 of 200 are bad, 8 and 6 of them in its parts: exit 3, no run folder, and the advice that is given helps."""
    root, run = folder_of(tmp_path / "pictures", 100, classes=2), tmp_path / "run"
    (root / "class0" / "dangling.png").symlink_to(tmp_path / "nowhere")  # in no part, and counted once
    spoil(root, "train", 7)
    spoil(root, "test", 6)
    one_line(pretrain(root, run), 3, "14 of 201 images", "over the 5% allowed", "--max-bad 0.07")
    assert not run.exists()
    pack = ("pack", str(root), str(tmp_path / "store"))
    one_line(kontrast(*pack), 3, "14 of 201 images", "--max-bad 0.07")
    assert kontrast(*pack, "--max-bad", "0.07").returncode == 0
    assert pretrain(root, run, "--max-bad", "0.07").returncode == 0
    one_line(kontrast("probe", str(run), "knn", "--max-bad", "0.05", "--device", "cpu"), 3, "14 of 201 images")
    assert pretrain(tmp_path / "store", tmp_path / "other").returncode == 0


@pytest.mark.fault(11)
def test_a_run_that_goes_on_may_allow_more_bad_images(tmp_path):
    """Images that turned out bad while a run trained stop it; `--resume --max-bad` goes on, on the same images."""
    tar, run = tar_of(tmp_path / "pictures.tar", [f"{n}.png" for n in range(0, 200, 7)]), tmp_path / "run"
    one_line(pretrain(tar, run, "data.pack=false", "training.max_steps=10"), 3, "11 of 200 images", "--max-bad 0.06")
    trained = json.loads((run / "run.json").read_text())["data"]
    go_on = ("pretrain", "--resume", "--no-probes", "--device", "cpu", "--out", str(run))
    one_line(kontrast(*go_on), 3, "11 of 200 images")
    assert kontrast(*go_on, "--max-bad", "0.2").returncode == 0
    assert "max_bad = 0.2" in (run / "recipe.toml").read_text() and kontrast(*go_on).returncode == 0
    assert json.loads((run / "run.json").read_text())["data"] == trained


@pytest.mark.fault(11)
def test_in_training_a_bad_image_is_replaced_by_the_same_one_every_time(tmp_path):
    """Images that are decoded as they are needed: two runs over the same bad files end with the same bits."""
    import io
    import tarfile

    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for number in range(64):
            content = b"nothing" if number in (5, 40) else encoded(picture(number), "PNG")
            info = tarfile.TarInfo(f"{number:03d}.png")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    ends = []
    for name in ("first", "second"):
        done = pretrain(tmp_path / "set.tar", tmp_path / name, "data.pack=false", "training.max_steps=8")
        assert done.returncode == 0 and "skipped 2 of 64 images" in done.stderr, done.stderr
        assert set(bad_lines(tmp_path / name)) == {"set.tar/005.png", "set.tar/040.png"}
        ends.append((tmp_path / name / "encoder.safetensors").read_bytes())
    assert ends[0] == ends[1]


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty file"),
        (b"<!DOCTYPE html><title>404</title>", "an HTML page"),
        (b"\x1f\x8b" + b"\0" * 30, "gzip data"),
        (b"%PDF-1.7 ...", "PDF"),
        (b"\x7fELF" + b"\0" * 60, "a program"),
        (b"not here\n", "text"),
    ],
    ids=["empty", "html", "gzip", "pdf", "program", "text"],
)
def test_what_is_no_image_is_named_for_what_it_is(tmp_path, content, words):
    """The file is skipped and its real type named; the other images are all there."""
    root = folder_of(tmp_path / "pictures", 30)
    (root / "photo.jpg").write_bytes(content)
    images = open_data(root)
    assert len(images) == 30 and len(images.bad) == 1
    assert images.bad[0][0] == "photo.jpg" and words in images.bad[0][1]


@pytest.mark.fault(13)
@pytest.mark.parametrize(
    "content",
    [
        png_bomb(20_000, 20_000),
        png_bomb(8_001, 8_001),
        png_bomb(1, 200_000),
        tiff_bomb(20_000, 20_000),
        tiff_bomb(200_000, 1),
        gif_bomb(20_000, 20_000),
        gif_bomb(65_000, 65_000),
    ],
    ids=["png", "just-over-64-Mpx", "thin-png", "tiff", "thin-tiff", "gif", "widest-gif"],
)
def test_a_bomb_is_refused_from_its_header(content):
    """Refused in under 50 ms and without memory; it is one bad file with its size as the reason."""
    from kontrast.data.decode import BadImage, decode

    assert len(content) < 60_000
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(BadImage, match="pixels"):
        decode(content)
    assert time.perf_counter() - start < 0.05
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.fault(13)
def test_bombs_in_a_folder_are_counted_as_bad(tmp_path):
    """The run trains on the good images; each bomb is in bad.jsonl."""
    root = folder_of(tmp_path / "pictures", 60)
    (root / "bomb.png").write_bytes(png_bomb(20_000, 20_000))
    (root / "bomb.gif").write_bytes(gif_bomb(60_000, 60_000))
    (root / "bomb.tiff").write_bytes(tiff_bomb(30_000, 30_000))
    assert pretrain(root, tmp_path / "run").returncode == 0
    reasons = bad_lines(tmp_path / "run")
    assert set(reasons) == {"bomb.png", "bomb.gif", "bomb.tiff"} and all("pixels" in r for r in reasons.values())


def deep_fixtures() -> dict[str, tuple[bytes, float]]:
    """File name to (content, the mean that its pixels must have)."""
    ramp = np.linspace(0, 255, 24 * 32).reshape(24, 32).round().astype(np.uint8)
    grey = Image.fromarray(ramp)
    half = Image.fromarray(np.full((24, 32), 128, np.uint8))
    palette = Image.new("P", (32, 24), 1)
    palette.putpalette([0, 0, 0, 90, 90, 90] + [0] * 762)
    deep = Image.fromarray((ramp.astype(np.uint16) * 257).astype(np.uint16))
    black = Image.new("RGB", (32, 24))
    black.putalpha(half)
    return {
        "deep.png": (encoded(deep, "PNG"), ramp.mean()),
        "deep.tif": (encoded(deep, "TIFF"), ramp.mean()),
        "grey.png": (encoded(grey, "PNG"), ramp.mean()),
        "alpha.png": (encoded(black, "PNG"), 127),
        "alpha.webp": (encoded(black, "WEBP", lossless=True), 127),
        "la.png": (encoded(Image.merge("LA", (Image.new("L", (32, 24), 0), half)), "PNG"), 127),
        "palette.png": (encoded(palette, "PNG"), 90),
        "clear.png": (encoded(palette, "PNG", transparency=1), 255),
        "clear.gif": (encoded(palette, "GIF", transparency=1), 255),
        "bit.png": (encoded(Image.new("1", (32, 24), 1), "PNG"), 255),
        "bit.tif": (encoded(Image.new("1", (32, 24), 0), "TIFF"), 0),
        "cmyk.jpg": (encoded(Image.new("CMYK", (32, 24), (255, 255, 255, 0)), "JPEG", quality=100), 0),
        "cmyk.tif": (encoded(Image.new("CMYK", (32, 24), (0, 0, 0, 0)), "TIFF"), 255),
    }


@pytest.mark.fault(14)
@pytest.mark.parametrize("name", sorted(deep_fixtures()))
def test_deep_alpha_palette_and_print_colours_keep_their_mean(tmp_path, name):
    """Nothing to see: 16-bit is scaled, alpha lies on white, palettes and CMYK become RGB, to 1/255 of the mean."""
    content, mean = deep_fixtures()[name]
    (tmp_path / name).write_bytes(content)
    images = open_data(tmp_path)
    assert not images.bad and abs(images.images.double().mean() - mean) <= 1.0


@pytest.mark.fault(14)
def test_float_images_need_their_range(tmp_path):
    """Exit 3 naming the setting; with data.float_range=[0,1] the same folder trains, its values kept."""
    ramp = np.linspace(0, 1, 20 * 20, dtype=np.float32).reshape(20, 20)
    root = tmp_path / "pictures"
    root.mkdir()
    for number in range(20):
        Image.fromarray(np.roll(ramp, number, 0)).save(root / f"{number}.tiff")
    one_line(pretrain(root, tmp_path / "run"), 3, "none of the 20 images", "data.float_range=[low,high]")
    assert not (tmp_path / "run").exists()
    done = pretrain(root, tmp_path / "run", "data.float_range=[0,1]")
    assert done.returncode == 0, done.stderr
    images = open_data(root, float_range=(0.0, 1.0))
    assert abs(images.images.double().mean() - 127.5) < 1 and int(images.images.max()) == 255
    for wrong in ("[1,0]", "[0]", "[0,0]", "[0,1,2]"):
        one_line(pretrain(root, tmp_path / "other", f"data.float_range={wrong}"), 2, "data.float_range")


@pytest.mark.fault(14)
def test_the_range_of_float_images_can_be_stated_to_every_command_that_reads_new_ones(tmp_path):
    """What the error advises works: pack, embed, neighbors and probe take --float-range, and leave nothing before."""
    ramp = np.linspace(-1, 1, 20 * 20, dtype=np.float32).reshape(20, 20)
    root, run, store, vectors = (tmp_path / name for name in ("pictures", "run", "store", "v.npy"))
    for number in range(40):
        (root / str(number % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.roll(ramp, number, 0)).save(root / str(number % 2) / f"{number}.tiff")
    copy(tmp_path)
    one = str(root / "0" / "0.tiff")
    commands = [
        ("pack", str(root), str(store)),
        ("embed", str(run), str(root), "--out", str(vectors), "--device", "cpu"),
        ("neighbors", str(run), one, "--embeddings", str(vectors), "-k", "3", "--device", "cpu", "--json"),
        ("probe", str(run), "knn", "--data", str(root), "--device", "cpu"),
    ]
    for command in commands:
        before = sorted(tmp_path.rglob("*"))
        one_line(kontrast(*command), 3, "float or 32-bit values", f"{command[0]}", "--float-range low,high")
        assert sorted(tmp_path.rglob("*")) == before
        for wrong in ("1,0", "0", "0,1,2", "nan,1", "0,inf", "dark,light"):
            one_line(kontrast(*command, "--float-range", wrong), 2, f"--float-range '{wrong}'", "increasing")
        done = kontrast(*command, "--float-range", "-1,1")
        assert done.returncode == 0, done.stderr
        if command[0] == "neighbors":
            assert json.loads(done.stdout)["neighbors"][0]["similarity"] == pytest.approx(1.0, abs=1e-4)
    assert abs(open_data(store).images.double().mean() - 127.5) < 1
    one_line(kontrast("probe", str(run), "--float-range", "0,1"), 2, "--float-range is for the images of --data")


@pytest.mark.fault(15)
def test_turned_and_animated_images_are_counted_in_the_report(tmp_path):
    """EXIF turns are applied, the first frame stands for an animation; the page says how many of each."""
    root = folder_of(tmp_path / "pictures", 30)
    exif = Image.Exif()
    exif[0x0112] = 6
    for number in range(4):
        wide = Image.fromarray(np.concatenate([np.zeros((20, 30), np.uint8), np.full((20, 30), 255, np.uint8)], 1))
        wide.save(root / f"turned{number}.jpg", exif=exif)
    frames = [Image.new("L", (20, 20), level) for level in (40, 120, 200)]
    for name in ("moving.gif", "moving.webp", "pages.tiff"):
        frames[0].save(
            root / name, save_all=True, append_images=frames[1:], **({"lossless": True} if "webp" in name else {})
        )
    images = open_data(root)
    place = {name: n for n, name in enumerate(images.names)}
    assert images.notes == {"turned": 4, "first frame": 3}
    assert images.images[place["turned0.jpg"]].shape == (3, 60, 20)
    assert int(images.images[place["turned0.jpg"]][0, 5, 10]) < 40
    for name in ("moving.gif", "moving.webp", "pages.tiff"):
        assert abs(int(images.images[place[name]][0, 9, 9]) - 40) <= 2
    done = kontrast("pretrain", str(root), *QUICK, "--device", "cpu", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "run" / "report.html").read_text()
    assert "turned 4" in page and "first frame 3" in page


@pytest.mark.fault(16)
def test_a_file_that_vanishes_mid_epoch_is_replaced_and_a_mount_that_does_stops(tmp_path, monkeypatch):
    """One lost file is counted with its errno; three in a row are the storage: exit 6, the run can be resumed."""
    from kontrast.training import step

    monkeypatch.setattr("kontrast.data.sources._free_memory", lambda: 1000)  # so that files are read as they are needed
    root = folder_of(tmp_path / "pictures", 160)
    taken, step_once = [], step.Step.__call__

    def during(self, *arguments):
        taken.append(None)
        if len(taken) == 2:
            (root / "0007.png").unlink()
        if len(taken) == 30:
            shutil.move(root, tmp_path / "unmounted")
        return step_once(self, *arguments)

    monkeypatch.setattr(step.Step, "__call__", during)
    more = ["data.pack=false", "training.epochs=9", "training.max_steps=90", "checkpoints.every=0.5"]
    done = pretrain(root, tmp_path / "run", *more)
    one_line(done, 6, "storage gone?", "No such file or directory (2)")
    assert len(taken) < 60
    assert "0007.png (No such file or directory (2))" in done.stderr
    assert sorted((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.fault(16)
def test_permission_denied_names_the_errno(tmp_path):
    """A file that may not be read is one bad file with errno 13; the others train."""
    with tempfile.TemporaryDirectory() as place:  # not pytest's own: nobody may not enter that
        os.chmod(place, 0o755)
        root = folder_of(Path(place) / "pictures", 30)
        (root / "0003.png").chmod(0)
        assert as_nobody(lambda: open_data(root).bad) == [["0003.png", "Permission denied (13)"]]
