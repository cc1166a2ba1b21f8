"""Images that are damaged, huge, rotated, gone or not images at all: skipped and named, or read correctly."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kontrast.data import decode_workers, open_data

from support.command_line import kontrast, one_line
from support.commands import as_nobody
from support.made_images import FORMATS, QUICK, encoded, folder_of, gif_bomb, picture, png_bomb, tiff_bomb, write_tar
from support.tiny_run import copy, images


def bad_lines(run) -> dict[str, str]:
    return {r["name"]: r["reason"] for r in map(json.loads, (run / "bad.jsonl").read_text().splitlines())}


def pretrain(root, out, *more: str):
    return kontrast("pretrain", str(root), *QUICK, *more, "--no-probes", "--device", "cpu", "--out", str(out))


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode in this process, without starting others."""
    monkeypatch.setattr(decode_workers, "usable_cores", lambda: 1)


@pytest.mark.fault(11)
def test_damaged_files_of_six_formats(tmp_path):
    """The number of skipped images and the first names are printed; the rest trains, and bad.jsonl has each reason."""
    root = folder_of(tmp_path / "pictures", 240)
    for number, (form, suffix) in enumerate(FORMATS.items()):
        content = encoded(picture(number, 64), form)
        (root / f"cut-{form}{suffix}").write_bytes(content[: len(content) // 2])
        (root / f"stub-{form}{suffix}").write_bytes(content[:20])
    done = pretrain(root, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "12 of 252 images" in done.stderr
    reasons = bad_lines(tmp_path / "run")
    assert set(reasons) == {f"{kind}-{form}{suffix}" for kind in ("cut", "stub") for form, suffix in FORMATS.items()}
    assert all(reasons.values())
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"]["skipped"] == 12


@pytest.mark.fault(11)
def test_too_many_bad_images(tmp_path):
    """Exit 3 with counts, the first names and the setting that allows more; there is no run folder."""
    root = folder_of(tmp_path / "pictures", 40)
    for number in range(3):
        (root / f"broken{number}.jpg").write_bytes(encoded(picture(number, 64), "JPEG")[:200])
    done = pretrain(root, tmp_path / "run")
    one_line(done, 3, "3 of 43 images", "5%", "broken0.jpg", "--max-bad 0.07", "data.max_bad=0.07")
    assert not (tmp_path / "run").exists()
    assert pretrain(root, tmp_path / "run", "data.max_bad=0.07").returncode == 0
    pack = ("pack", str(root), str(tmp_path / "store"))
    one_line(kontrast(*pack), 3, "3 of 43 images", "--max-bad 0.07")
    assert kontrast(*pack, "--max-bad", "0.07").returncode == 0


@pytest.mark.fault(11)
def test_bad_images_of_a_probe(tmp_path):
    """Exit 3 if too many images of `probe --data` are bad; --max-bad allows more."""
    other = tmp_path / "labelled"
    shutil.copytree(images(), other)
    for number in range(20):
        (other / "0" / f"broken{number}.png").write_bytes(b"nothing")
    probe = ("probe", str(copy(tmp_path)), "knn", "--data", str(other), "--device", "cpu")
    one_line(kontrast(*probe), 3, "5%", "--max-bad")
    done = kontrast(*probe, "--max-bad", "0.1")
    skipped = [int(n) for n in re.findall(r"(\d+) of \d+ (?:train|test) images: 0/broken", done.stderr)]
    assert done.returncode == 0 and sum(skipped) == 20 and len(skipped) == 2


def spoil(root: Path, split: str, count: int) -> list[str]:
    names = open_data(root, split).names[:count]
    for name in names:
        (root / name).write_bytes(b"nothing")
    return names


def tar_of(path: Path, bad) -> Path:
    """Write a shard of 200 images in two classes; those named in `bad` are not images."""
    members = []
    for number in range(200):
        content = b"nothing" if f"{number}.png" in bad else encoded(picture(number), "PNG")
        members += [(f"{number}.png", content), (f"{number}.cls", b"%d" % (number % 2))]
    return write_tar(path, members)


@pytest.mark.fault(11)
def test_all_bad_images_are_held_out(tmp_path, one_core):
    """3 of 200 bad images are skipped even if all are among the 40 held-out ones, in folders, stores and shards."""
    root = folder_of(tmp_path / "pictures", 100, classes=2)
    spoil(root, "test", 3)
    probed = ("pretrain", *QUICK, "evaluation.every=1", "--device", "cpu", "--out")
    done = kontrast(*probed, str(tmp_path / "r"), str(root))
    assert done.returncode == 0 and "3 of 40 test images" in done.stderr, done.stderr
    assert kontrast("pack", str(root), str(tmp_path / "store")).returncode == 0
    tar = tar_of(tmp_path / "pictures.tar", ())
    tar_of(tar, [name.split("/")[-1] for name in open_data(tar, "test").names[:3]])
    for more in ((), ("data.pack=false",)):
        done = kontrast(*probed, str(tmp_path / f"tar{len(more)}"), str(tar), *more)
        assert done.returncode == 0 and (more or "3 of 40 test images" in done.stderr), done.stderr


@pytest.mark.fault(11)
def test_bad_images_of_both_parts_count_together(tmp_path):
    """Exit 3 for 14 of 201, and there is no run folder; the advice in the message works."""
    root, run = folder_of(tmp_path / "pictures", 100, classes=2), tmp_path / "run"
    (root / "class0" / "dangling.png").symlink_to(tmp_path / "nowhere")  # in neither part, and counted once
    spoil(root, "train", 7)
    spoil(root, "test", 6)
    one_line(pretrain(root, run), 3, "14 of 201 images", "5%", "--max-bad 0.07")
    assert not run.exists()
    pack = ("pack", str(root), str(tmp_path / "store"))
    one_line(kontrast(*pack), 3, "14 of 201 images", "--max-bad 0.07")
    assert kontrast(*pack, "--max-bad", "0.07").returncode == 0
    assert pretrain(root, run, "--max-bad", "0.07").returncode == 0
    one_line(kontrast("probe", str(run), "knn", "--max-bad", "0.05", "--device", "cpu"), 3, "14 of 201 images")
    assert pretrain(tmp_path / "store", tmp_path / "other").returncode == 0


@pytest.mark.fault(11)
def test_resumed_run_may_allow_more_bad_images(tmp_path, one_core):
    """Images that turn out bad stop a run; `--resume --max-bad` continues with the same images."""
    tar, run = tar_of(tmp_path / "pictures.tar", [f"{n}.png" for n in range(0, 200, 7)]), tmp_path / "run"
    one_line(pretrain(tar, run, "data.pack=false", "training.max_steps=10"), 3, "11 of 200 images", "--max-bad 0.06")
    trained = json.loads((run / "run.json").read_text())["data"]
    resume = ("pretrain", "--resume", "--no-probes", "--device", "cpu", "--out", str(run))
    one_line(kontrast(*resume), 3, "11 of 200 images")
    assert kontrast(*resume, "--max-bad", "0.2").returncode == 0
    assert "max_bad = 0.2" in (run / "recipe.toml").read_text() and kontrast(*resume).returncode == 0
    assert json.loads((run / "run.json").read_text())["data"] == trained


@pytest.mark.fault(11)
def test_replacement_of_a_bad_image_is_deterministic(tmp_path, one_core):
    """Two runs that decode the same bad files while training end with the same bits."""
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
        assert done.returncode == 0 and "2 of 64 images" in done.stderr, done.stderr
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
def test_file_that_is_not_an_image(tmp_path, content, words):
    """The file is skipped and its real type named; all other images are read."""
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
def test_bomb_is_refused_from_its_header(content):
    """It is refused without decoding and without memory; its size is the reason."""
    from kontrast.data.decode import BadImage, decode

    assert len(content) < 60_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadImage, match="pixels"):
        decode(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.fault(13)
def test_bombs_in_a_folder(tmp_path):
    """The good images train; each bomb is in bad.jsonl."""
    root = folder_of(tmp_path / "pictures", 60)
    (root / "bomb.png").write_bytes(png_bomb(20_000, 20_000))
    (root / "bomb.gif").write_bytes(gif_bomb(60_000, 60_000))
    (root / "bomb.tiff").write_bytes(tiff_bomb(30_000, 30_000))
    assert pretrain(root, tmp_path / "run").returncode == 0
    reasons = bad_lines(tmp_path / "run")
    assert set(reasons) == {"bomb.png", "bomb.gif", "bomb.tiff"} and all("pixels" in r for r in reasons.values())


def unusual_images() -> dict[str, tuple[bytes, float]]:
    """Return files and the mean that their pixels must have, by name."""
    ramp = np.linspace(0, 255, 24 * 32).reshape(24, 32).round().astype(np.uint8)
    gray = Image.fromarray(ramp)
    half = Image.fromarray(np.full((24, 32), 128, np.uint8))
    palette = Image.new("P", (32, 24), 1)
    palette.putpalette([0, 0, 0, 90, 90, 90] + [0] * 762)
    deep = Image.fromarray((ramp.astype(np.uint16) * 257).astype(np.uint16))
    black = Image.new("RGB", (32, 24))
    black.putalpha(half)
    return {
        "deep.png": (encoded(deep, "PNG"), ramp.mean()),
        "deep.tif": (encoded(deep, "TIFF"), ramp.mean()),
        "gray.png": (encoded(gray, "PNG"), ramp.mean()),
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
@pytest.mark.parametrize("name", sorted(unusual_images()))
def test_unusual_pixel_formats_keep_their_mean(tmp_path, name):
    """16-bit is scaled, alpha is blended with white, palettes and CMYK become RGB; the mean is right to 1/255."""
    content, mean = unusual_images()[name]
    (tmp_path / name).write_bytes(content)
    images = open_data(tmp_path, depth="8-bit")
    assert not images.bad and abs(images.images.double().mean() - mean) <= 1.0


@pytest.mark.fault(14)
def test_float_images_need_a_range(tmp_path):
    """To become 8-bit: exit 3 names the setting; with data.float_range=[0,1] the values are preserved."""
    ramp = np.linspace(0, 1, 20 * 20, dtype=np.float32).reshape(20, 20)
    root = tmp_path / "pictures"
    root.mkdir()
    for number in range(20):
        Image.fromarray(np.roll(ramp, number, 0)).save(root / f"{number}.tiff")
    one_line(pretrain(root, tmp_path / "run", "data.depth=8-bit"), 3, "20 images", "data.float_range=[low,high]")
    assert not (tmp_path / "run").exists()
    done = pretrain(root, tmp_path / "run", "data.float_range=[0,1]")
    assert done.returncode == 0, done.stderr
    images = open_data(root, float_range=(0.0, 1.0))
    assert abs(images.images.double().mean() - 127.5) < 1 and int(images.images.max()) == 255
    for wrong in ("[1,0]", "[0]", "[0,0]", "[0,1,2]"):
        one_line(pretrain(root, tmp_path / "other", f"data.float_range={wrong}"), 2, "data.float_range")


@pytest.mark.fault(14)
def test_float_range_of_other_commands(tmp_path):
    """The advice in the message works: pack, embed, neighbors and probe take --float-range and left no files before."""
    ramp = np.linspace(-1, 1, 20 * 20, dtype=np.float32).reshape(20, 20)
    root, run, store, vectors = (tmp_path / name for name in ("pictures", "run", "store", "v.npy"))
    for number in range(40):
        (root / str(number % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.roll(ramp, number, 0)).save(root / str(number % 2) / f"{number}.tiff")
    copy(tmp_path)
    one = str(root / "0" / "0.tiff")
    commands = [
        ("pack", str(root), str(store), "--depth", "8-bit"),
        ("embed", str(run), str(root), "--out", str(vectors), "--device", "cpu"),
        ("neighbors", str(run), one, "--embeddings", str(vectors), "-k", "3", "--device", "cpu", "--json"),
        ("probe", str(run), "knn", "--data", str(root), "--device", "cpu"),
    ]
    for command in commands:
        before = sorted(tmp_path.rglob("*"))
        one_line(kontrast(*command), 3, "--float-range low,high")
        assert sorted(tmp_path.rglob("*")) == before
        for wrong in ("1,0", "0", "0,1,2", "nan,1", "0,inf", "dark,light"):
            one_line(kontrast(*command, "--float-range", wrong), 2, f"--float-range '{wrong}'")
        done = kontrast(*command, "--float-range", "-1,1")
        assert done.returncode == 0, done.stderr
        if command[0] == "neighbors":
            assert json.loads(done.stdout)["neighbors"][0]["similarity"] == pytest.approx(1.0, abs=1e-4)
    assert abs(open_data(store).images.double().mean() - 127.5) < 1
    one_line(kontrast("probe", str(run), "--float-range", "0,1"), 2, "--float-range", "--data")


@pytest.mark.fault(15)
def test_rotated_and_animated_images(tmp_path):
    """EXIF rotations are applied and the first frame is used; the report says how many there are of each."""
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
    assert re.search(r"(turned|rotated)\D{0,9}4", page) and re.search(r"first frame\D{0,9}3", page)


@pytest.mark.fault(16)
def test_files_that_disappear_while_training(tmp_path, monkeypatch):
    """One lost file is counted with its error number; three in a row are exit 6, and the run can be resumed."""
    from kontrast.training import step

    monkeypatch.setattr("kontrast.data.sources._free_memory", lambda: 1000)  # so that files are read during training
    root = folder_of(tmp_path / "pictures", 160)
    taken, step_once = [], step.Step.__call__

    def during(self, *arguments, **of_images):
        taken.append(None)
        if len(taken) == 2:
            (root / "0007.png").unlink()
        if len(taken) == 30:
            shutil.move(root, tmp_path / "unmounted")
        return step_once(self, *arguments, **of_images)

    monkeypatch.setattr(step.Step, "__call__", during)
    more = ["data.pack=false", "training.epochs=9", "training.max_steps=90", "checkpoints.every=0.5"]
    done = pretrain(root, tmp_path / "run", *more)
    one_line(done, 6, "storage", "No such file or directory (2)")
    assert len(taken) < 60
    assert "0007.png (No such file or directory (2))" in done.stderr
    assert sorted((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.fault(16)
def test_unreadable_file(tmp_path):
    """A file without read permission is one bad file with error number 13; the others train."""
    with tempfile.TemporaryDirectory() as place:  # the user nobody may not enter pytest's folder
        os.chmod(place, 0o755)
        root = folder_of(Path(place) / "pictures", 30)
        (root / "0003.png").chmod(0)
        assert as_nobody(lambda: open_data(root).bad) == [["0003.png", "Permission denied (13)"]]
