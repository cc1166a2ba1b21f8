"""Damaged files of every kind that kontrast reads: a complete result, or one of our own errors."""

from __future__ import annotations

import contextlib
import io
import json
import resource

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from kontrast.data.decode import BadImage, Limits, decode
from kontrast.data.shards import scan_shards
from kontrast.errors import CheckpointError, DataError, KontrastError
from kontrast.files import read_json_lines
from kontrast.runs.embeddings_file import names_path, read_embeddings
from kontrast.training.checkpoints import read_weights

from support.fuzzing import amounts, fuzz, mutated
from support.made_images import FORMATS, encoded, picture, png_members, write_tar


@pytest.mark.fault(11)
@amounts(60, 4_000)
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_damaged_images(form, cases, tally):
    """Decoding gives an image with three channels or a reason, without a crash and with little memory."""
    sources = [
        encoded(picture(0, 48, 64), form),
        encoded(picture(1, 24).convert("L"), form),
        encoded(picture(2, 24).convert("P"), form)
        if form not in ("JPEG", "WEBP")
        else encoded(picture(2, 24), form, quality=20),
    ]
    before, bad = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for seed in range(cases):
        try:
            pixels, _ = decode(mutated(sources[seed % 3], seed), Limits(bound=32 if seed % 2 else None))
            assert pixels.ndim == 3 and pixels.shape[0] == 3 and pixels.dtype == np.uint8 and pixels.size
        except BadImage as error:
            assert error.reason
            bad += 1
    assert bad > cases // 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000
    tally("fuzz cases", cases)


@pytest.mark.fault(36)
@amounts(60, 5_000)
def test_damaged_tars(tmp_path, cases, tally):
    """Complete members are found, or exit 3; nothing beyond the end of the file is read."""
    path = tmp_path / "set.tar"
    labelled = [m for name, content in png_members(4) for m in ((name, content), (name[:4] + ".cls", b"1"))]
    whole = write_tar(path, labelled).read_bytes()
    for seed in range(cases):
        content = mutated(whole, seed)
        path.write_bytes(content)
        try:
            found = scan_shards(str(path))
            assert all(i.offset >= 0 and i.offset + i.length <= len(content) for i in found.items)
        except DataError:
            pass
    tally("fuzz cases", cases)


@pytest.mark.fault(33)
@amounts(150, 10_000)
def test_damaged_safetensors(tmp_path, cases, tally):
    """Tensors, or exit 4."""
    from safetensors.torch import save

    whole = save({"a.weight": torch.randn(4, 3), "b": torch.arange(5), "c": torch.ones(2, dtype=torch.bfloat16)})
    path = tmp_path / "w.safetensors"
    for seed in range(cases):
        path.write_bytes(mutated(whole, seed))
        with contextlib.suppress(CheckpointError):
            assert all(isinstance(t, torch.Tensor) for t in read_weights(path).values())
    tally("fuzz cases", cases)


def check_embeddings(path) -> None:
    try:
        found = read_embeddings(path)
        assert found.vectors.ndim == 2 and len(found) == len(found.names) > 0
        assert bool(torch.isfinite(found.rows()).all())
    except KontrastError as error:
        assert isinstance(error, DataError) and str(path.stem) in str(error)


@pytest.mark.fault(38)
@amounts(150, 5_000)
def test_damaged_npy(tmp_path, cases, tally):
    """Finite rows, each with a name, or exit 3 that names the file; nothing is unpickled or read beyond its end."""
    path = tmp_path / "vectors.npy"
    buffer = io.BytesIO()
    np.save(buffer, np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32))
    names = "".join(json.dumps({"id": i, "path": f"{i}.png"}) + "\n" for i in range(12)).encode()
    for seed in range(cases):
        path.write_bytes(mutated(buffer.getvalue(), seed) if seed % 2 else buffer.getvalue())
        names_path(path).write_bytes(names if seed % 2 else mutated(names, seed))
        check_embeddings(path)
    tally("fuzz cases", cases)


@pytest.mark.fault(38)
@amounts(100, 3_000)
def test_damaged_parquet(tmp_path, cases, tally):
    """Finite rows, or exit 3; a wrong checksum or a truncated file is never another kind of error."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra kontrast[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet")

    path = tmp_path / "vectors.parquet"
    columns = {"vector": [[float(i), 1.0, 2.0] for i in range(9)], "path": [f"{i}.png" for i in range(9)]}
    parquet.write_table(pyarrow.table(columns), path)
    whole = path.read_bytes()
    for seed in range(cases):
        path.write_bytes(mutated(whole, seed))
        check_embeddings(path)
    tally("fuzz cases", cases)


@pytest.mark.fault(38)
@amounts(60, 1_500)
def test_parquet_with_any_columns(tmp_path, cases, tally):
    """Tables with any column types and lengths are read, or refused with exit 3."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra kontrast[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet")

    path = tmp_path / "vectors.parquet"
    numbers = st.one_of(st.none(), st.floats(), st.integers(-9, 9))
    words = st.one_of(st.text(max_size=3), st.binary(max_size=3), st.booleans())
    values = st.one_of(numbers, words, st.lists(numbers, max_size=3), st.lists(words, max_size=2))

    def attempt(rows: int, vector: object, label: object, path_column: object) -> None:
        columns = {"vector": [vector] * rows, "label": [label] * rows, "path": [path_column] * rows}
        try:
            table = pyarrow.table(columns)
        except (pyarrow.ArrowException, UnicodeEncodeError):
            return
        parquet.write_table(table, path)
        check_embeddings(path)

    tally("fuzz cases", fuzz(cases, attempt, rows=st.integers(0, 4), vector=values, label=values, path_column=values))


@pytest.mark.fault(39)
@amounts(60, 2_000)
def test_metrics_with_any_content(tmp_path, cases, tally):
    """With any JSON, or none, on the lines of metrics.jsonl, reading gives records and the report is written."""
    from kontrast.reports import report

    run = tmp_path / "run"
    run.mkdir()
    anything = st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
        max_leaves=6,
    )
    keys = st.sampled_from(
        ["step", "epoch", "loss", "knn", "effective_rank", "lr", "images_per_second", "</script>", ""]
    )
    lines = st.lists(st.one_of(st.dictionaries(keys, anything, max_size=5), anything), max_size=6)

    def attempt(lines: list, torn: bytes, probes: object) -> None:
        content = b"\n".join(json.dumps(line).encode() for line in lines) + b"\n" + torn
        for name in ("metrics.jsonl", "speed.jsonl"):
            (run / name).write_bytes(content)
        (run / "probes.json").write_text(json.dumps({"probes": probes}))
        (run / "run.json").write_text(json.dumps({"data": probes, "seconds": probes}))
        assert all(isinstance(record, dict) for record in read_json_lines(run / "metrics.jsonl"))
        report([run], tmp_path / "page.html")

    tally("fuzz cases", fuzz(cases, attempt, lines=lines, torn=st.binary(max_size=20), probes=anything))


@pytest.mark.fault(38)
@amounts(80, 3_000)
def test_damaged_stores(tmp_path, cases, tally):
    """A packed store with any byte changed opens completely, or is refused with exit 3."""
    import shutil

    from kontrast.data import open_data
    from kontrast.data.pack import pack

    from support.made_images import folder_of

    root = folder_of(tmp_path / "pictures", 6, classes=2)
    pack(root, tmp_path / "store")
    shutil.rmtree(root)  # so that the store can't be rebuilt
    place = tmp_path / "store" / "train"
    files = {path.name: path.read_bytes() for path in place.iterdir()}
    for seed in range(cases):
        name = sorted(files)[seed % len(files)]
        (place / name).write_bytes(mutated(files[name], seed))
        try:
            images = open_data(tmp_path / "store")
            assert len(images) == len(images.names) and images.images[0].dtype == torch.uint8
        except DataError:
            pass
        (place / name).write_bytes(files[name])
    assert len(open_data(tmp_path / "store")) > 0
    tally("fuzz cases", cases)
