"""Tar shards from strangers: nothing is extracted, and truncated shards give their complete members."""

from __future__ import annotations

import os
import pickle
import tarfile

import pytest

from kontrast.data import open_data

from support.command_line import kontrast, one_line
from support.made_images import QUICK, encoded, picture, png_members, write_tar


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.fault(36)
def test_hostile_members_are_skipped(tmp_path):
    """The good images train and the other members are counted by kind; nothing is written outside the run folder."""
    canary = tmp_path / "canary"

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(canary),)

    (tmp_path / "secret.png").write_bytes(encoded(picture(9), "PNG"))
    evil = pickle.dumps(Payload())
    members = [
        ("../outside.png", encoded(picture(1), "PNG")),
        ("a/../../outside.png", encoded(picture(1), "PNG")),
        ("/absolute.png", encoded(picture(1), "PNG")),
        *((f"evil.{kind}", evil) for kind in ("pkl", "pyd", "pth", "pt", "npy", "npz", "pickle")),
    ]
    odd = [
        special("link.png", tarfile.SYMTYPE, str(tmp_path / "secret.png")),
        special("hard.png", tarfile.LNKTYPE, "0000.png"),
        special("device.png", tarfile.CHRTYPE),
        special("block.png", tarfile.BLKTYPE),
        special("pipe.png", tarfile.FIFOTYPE),
        special("folder.png", tarfile.DIRTYPE),
    ]
    tar = write_tar(tmp_path / "set.tar", png_members(40) + members, odd)
    before = set(tmp_path.rglob("*"))
    done = kontrast("pretrain", str(tar), *QUICK, "--no-probes", "--device", "cpu", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    made = {p for p in set(tmp_path.rglob("*")) - before if not p.is_relative_to(tmp_path / "run")}
    assert not made and not canary.exists() and not (tmp_path.parent / "outside.png").exists()
    images = open_data(tar, "all")
    assert len(images) == 40 and images.notes == {
        "members that point outside": 3,
        "members that are no plain files": 6,
        "members of other kinds": 7,
    }


@pytest.mark.fault(36)
def test_sparse_members_and_wrong_sizes_cost_nothing(tmp_path):
    """A sparse member of a terabyte is skipped; a size beyond the end of the archive is a bad image."""
    tar = write_tar(tmp_path / "set.tar", png_members(40))
    header = tarfile.TarInfo("huge.png")
    header.size = 2**40
    content = tar.read_bytes().rstrip(b"\0")
    content += b"\0" * (-len(content) % 512)
    tar.write_bytes(content + header.tobuf(tarfile.GNU_FORMAT) + b"\0" * 512)
    images = open_data(tar, "all")
    assert len(images) == 40 and images.bad[0][0] == "set.tar/huge.png"
    sparse = special("sparse.png", tarfile.GNUTYPE_SPARSE)
    write_tar(tmp_path / "sparse.tar", png_members(40), [sparse], tarfile.GNU_FORMAT)
    assert len(open_data(tmp_path / "sparse.tar", "all")) == 40


@pytest.mark.fault(36)
@pytest.mark.parametrize("cut", [0.3, 0.51, 0.77, 0.999])
def test_truncated_tar(tmp_path, cut):
    """Complete members train, and the truncation is one bad file."""
    tar = write_tar(tmp_path / "set.tar", png_members(60))
    whole = tar.read_bytes().rstrip(b"\0")
    tar.write_bytes(whole[: int(len(whole) * cut)])
    images = open_data(tar, "all", max_bad=0.2)
    assert 60 * cut - 3 <= len(images) < 60 and 1 <= len(images.bad) <= 2


@pytest.mark.fault(36)
@pytest.mark.parametrize(
    ("content", "code"), [(b"", 3), (b"nothing" * 200, 3), (b"\0" * 10240, 3), (b"\x1f\x8b" + b"\0" * 2000, 3)]
)
def test_file_that_is_not_a_tar(tmp_path, content, code):
    """Exit 3 names the shards; there is no run folder."""
    (tmp_path / "set.tar").write_bytes(content)
    done = kontrast("pretrain", str(tmp_path / "set.tar"), "--device", "cpu", "--out", str(tmp_path / "run"))
    one_line(done, code, "set.tar")
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(36)
def test_labels_in_a_tar_are_only_text(tmp_path):
    """Labels with markup, newlines, odd bytes or a megabyte of digits are class names or ignored, never code."""
    words = [b"<script>x</script>", b"two\nlines", b"\xff\xfe", b"__import__('os')"]
    members = [
        m
        for n, (name, content) in enumerate(png_members(40))
        for m in ((name, content), (name[:4] + ".cls", words[n % 4]))
    ]
    images = open_data(write_tar(tmp_path / "set.tar", members), "all")
    assert len(images) == 40 and len(images.classes) == 4 and "<script>x</script>" in images.classes
    members = [
        m
        for n, (name, content) in enumerate(png_members(40))
        for m in ((name, content), (name[:4] + ".cls", b"9" * (10 + n)))
    ]
    images = open_data(write_tar(tmp_path / "digits.tar", members), "all")
    assert len(images) == 40 and len(images.classes) == 40
    members = [
        m
        for n, (name, content) in enumerate(png_members(40))
        for m in ((name, content), (name[:4] + ".cls", b"7" * 2**20))
    ]
    assert open_data(write_tar(tmp_path / "long.tar", members), "all").labels is None


@pytest.mark.fault(36)
@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("pipe:touch owned", 2),
        ("pipe:touch owned; cat x.tar", 2),
        ("simplecache::http://127.0.0.1:9/x.tar", 2),
        ("reference://x.tar", 2),
        ("x-{0..99999999999}.tar", 2),
        ("x-{9..0}.tar", 2),
        ("x-{0..999}-{0..999}-{0..999}.tar", 2),
        ("x-{000..002}.tar", 3),
    ],
)
def test_shards_are_never_commands_or_chained_addresses(tmp_path, monkeypatch, spec, code):
    """Exit 2 (3 for missing shards) and one line; no command runs, and nothing is downloaded or allocated."""
    monkeypatch.chdir(tmp_path)
    done = kontrast("pretrain", spec, "--device", "cpu", "--out", str(tmp_path / "run"))
    one_line(done, code)
    assert list(tmp_path.iterdir()) == []
