"""What the learning fuzzer reads: every parser of kontrast that meets files of others.

Checksums are recomputed after a mutation (`_with_digests`), as an attacker would: a flipped bit is found by its digest,
so what has to be tried is a file whose digests are right and whose content is not.

    PYTHONPATH=src:tests python -m support.fuzz_targets --minutes 10 [--seed N] [--out FOLDER] [TARGET ...]
    PYTHONPATH=src:tests python -m support.fuzz_targets --write-corpus

The first fuzzes targets, each for the given time, and writes what it finds, minimized, to FOLDER. The second writes the
first inputs of tests/support/corpus, to which finds are added by hand.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from kontrast.config import recipe as settings
from kontrast.config.recipe_files import FOLDER, resolve
from kontrast.data import open_data
from kontrast.data.changes import _read as read_listing
from kontrast.data.decode import FORMATS, BadImage, Limits, decode, decode_file, read_sides
from kontrast.data.pack import pack
from kontrast.data.shards import scan_shards
from kontrast.data.store import digest_of
from kontrast.errors import KontrastError
from kontrast.files import JsonLines, read_json_lines
from kontrast.reports.report import ReportError, report
from kontrast.runs.embeddings_file import read_embeddings
from kontrast.runs.run import Run
from kontrast.training import checkpoints
from kontrast.training.loop import Loop
from kontrast.training.run_folder import RunFolder
from kontrast.training.step_schedule import schedule_of

from support.learning_fuzzer import CORPUS, JSON, NUMBERS, Target, join_files, split_files, write_files
from support.made_images import encoded, picture, write_tar

TINY_RECIPE = """seed = 0
[objective]
name = "nt-xent"
[views]
size = 8
[encoder]
name = "small-conv"
width = 8
[head]
name = "linear"
outputs = 4
[data]
source = "photos"
[training]
epochs = 2
batch = 2
"""
RECIPE_TOKENS = [
    b"[", b"]", b"[[", b"=", b'"', b"'''", b'"""', b"#", b"\n", b".", b"{", b"}", b"true", b"false", b"inf", b"nan",
    b"1979-05-27T07:32:00Z", b"0x", b"1_0", b"\\u", b"base", b"name", b"arguments", b"training.", b"batch_norm.kind",
    b"[data]\n", b"[views]\n", b"[encoder]\n", b"\xff", b"\x00", b"=[", b"a.b.c", *NUMBERS,
]  # fmt: skip
KEYS_OF_RUNS = [
    b'"step"', b'"epoch"', b'"loss"', b'"knn"', b'"version"', b'"data"', b'"seconds"', b'"probes"', b'"accuracy"',
    b'"probe"', b'"features"', b'"protocol"', b'"points"', b'"queries"', b'"tile"', b'"classes"', b'"series"', b'"x"',
    b'"y"', b'"tables"', b'"rows"', b'"columns"', b'"data_place"', b'"effective_rank"', b'"conditional_entropy_max"',
]  # fmt: skip


# Recipes


def read_recipe_file(content: bytes, folder: Path) -> None:
    """Read a recipe with overrides, write it, and read it back."""
    files = split_files(content, ("recipe.toml", "overrides"))
    (folder / "mine.toml").write_bytes(files.get("recipe.toml", b""))
    overrides = files.get("overrides", b"").decode("utf-8", "replace").splitlines()
    recipe = resolve(str(folder / "mine.toml"), overrides)
    text = settings.to_toml(recipe)
    assert settings.read_recipe(settings.parse_toml(text, "written")) == recipe
    settings.fingerprint(recipe)


# Images and archives


def decode_image(content: bytes, folder: Path) -> None:
    """Decode an image whole, reduced and with a range for floats, and read its size alone."""
    (folder / "image").write_bytes(content)
    for limits in (Limits(max_pixels=1_000_000), Limits(bound=4, max_pixels=1_000_000, float_range=(0, 1))):
        try:
            pixels, _note = decode(content, limits)
        except BadImage:
            continue
        assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[0] == 3 and pixels.size
        assert sorted(read_sides(str(folder / "image"), limits=limits)) == sorted(pixels.shape[1:]) or limits.bound
    decode(content)


def read_shard(content: bytes, folder: Path) -> None:
    """List a shard and decode its images."""
    (folder / "set.tar").write_bytes(content)
    with cache_in(folder):
        found = scan_shards(str(folder / "set.tar"))
    for item in found.items:
        assert item.offset >= 0 and item.length >= 0 and item.offset + item.length <= len(content)
        with contextlib.suppress(BadImage):
            decode_file(item.path, item.offset, item.length)


# Weights, checkpoints and run folders


def read_encoder(content: bytes, folder: Path) -> None:
    """Load the encoder of a run folder of others."""
    names = ("recipe.toml", "run.json", "encoder.safetensors", "files.txt.gz")
    files = split_files(content, names)
    if "run.json" in files:
        files["run.json"] = _with_digests(files["run.json"], _run_digests, files)
    write_files(folder, files)
    run = Run(folder)
    str(run)
    run.data_settings  # noqa: B018
    read_listing(files.get("files.txt.gz", b""))
    if (folder / "encoder.safetensors").exists():
        checkpoints.read_weights(folder / "encoder.safetensors")
    if small(run.recipe):
        run.encoder()


def _run_digests(tree: dict[str, Any], files: dict[str, bytes]) -> None:
    tree["recipe_sha256"] = [hashlib.sha256(files.get("recipe.toml", b"")).hexdigest()]
    tree["encoder_sha256"] = hashlib.sha256(files.get("encoder.safetensors", b"")).hexdigest()


def small(recipe: settings.Recipe) -> bool:
    """Return whether the network can be built in milliseconds: its size is the user's to choose."""
    arguments = [*recipe.encoder.arguments.values(), *recipe.head.arguments.values(), recipe.views.size]
    return recipe.encoder.name == "small-conv" and all(not isinstance(a, int | float) or a < 100 for a in arguments)


CHECKPOINT = ("manifest.json", "state.json", "state.safetensors")


def restore_checkpoint(content: bytes, folder: Path) -> None:
    """Resume from a checkpoint, and save again."""
    files = split_files(content, CHECKPOINT)
    if "manifest.json" in files:
        files["manifest.json"] = _with_digests(files["manifest.json"], _checkpoint_digests, files)
    write_files(folder, {f"checkpoints/step-00000002/{name}": text for name, text in files.items()})
    write_files(folder, {"run.json": b'{"version": 1}'})
    loop = tiny_loop()
    loop.best, loop.owed, loop.failures, loop.position.step = {}, False, [], 0
    loop.folder, loop.log.folder = RunFolder(folder), RunFolder(folder)
    loop.log.metrics = JsonLines(folder / "metrics.jsonl")
    loop.log.metrics.open()
    try:
        loop.restore()
        if loop.position.step <= loop.position.total:
            loop.save()
            schedule_of(loop.recipe, loop.position)
    finally:
        loop.log.metrics.close()


def _checkpoint_digests(tree: dict[str, Any], files: dict[str, bytes]) -> None:
    with contextlib.suppress(KeyError, TypeError):
        for name in CHECKPOINT[1:]:
            tree["files"][name]["sha256"] = hashlib.sha256(files[name]).hexdigest()
    tree.pop("self", None)
    tree["self"] = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


@functools.cache
def tiny_loop() -> Loop:
    """Return a loop over four images; a damaged checkpoint must not change more of it than its weights."""
    from kontrast.data import ImageSet

    tree = settings.parse_toml(TINY_RECIPE, "tiny")
    images = ImageSet(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), list("abcd"))
    return Loop(settings.read_recipe(tree), RunFolder("none"), images, torch.device("cpu"), lambda _: None)


RUN_FILES = (
    "recipe.toml", "run.json", "metrics.jsonl", "speed.jsonl", "probes.json", "lens.json", "gallery.json",
    "gallery.png", "comparison.json",
)  # fmt: skip


def write_report(content: bytes, folder: Path) -> None:
    """Write the report of a run folder and of a study."""
    files = split_files(content, RUN_FILES)
    study = files.pop("comparison.json", None)
    write_files(folder, {f"run/{name}": text for name, text in files.items()})
    (folder / "run").mkdir(exist_ok=True)
    if study is not None:
        write_files(folder, {"comparison.json": study})
    page = report([folder / "run"], folder / "page.html", folder / "comparison.json" if study is not None else None)
    text = page.read_bytes()
    assert text.count(b"<script") == 2 and b"Infinity" not in text.split(b"</script>")[0].split(b"<script")[-1]


def read_metrics(content: bytes, folder: Path) -> None:
    """Open a log to continue it, and read it back."""
    path = folder / "metrics.jsonl"
    path.write_bytes(content)
    for step, owed in ((None, False), (3, True)):
        log = JsonLines(path)
        log.open(step, owed)
        log.write(step=4, loss=1.0)
        log.close()
        records = read_json_lines(path)
        assert records[-1] == {"step": 4, "loss": 1.0} and all(isinstance(record, dict) for record in records)


# Packed stores


STORE = ("store.json", "sizes.i64", "labels.i64", "stamps.i64", "names.json", "bad.jsonl", "images.u8")


def read_store(content: bytes, folder: Path) -> None:
    """Open a packed store and use it as training does."""
    files = split_files(content, STORE)
    if "store.json" in files:
        files["store.json"] = _with_digests(files["store.json"], _store_digests, files)
    write_files(folder, {f"store/train/{name}": text for name, text in files.items()})
    with cache_in(folder):
        images = open_data(folder / "store")
    use_images(images)


def use_images(images: Any) -> None:
    """Use images as commands do: batches, labels, classes, names and the record of bad ones."""
    assert len(images) == len(images.names) > 0 and images.channels >= 1 and images.typical_side >= 1
    pixels, _ = images.batch(torch.arange(len(images)))
    assert pixels.dtype == torch.uint8 and all(isinstance(name, str) for name in images.names)
    for name, reason in images.bad:
        assert isinstance(name, str) and isinstance(reason, str)
    if images.labels is not None:
        assert len(images.labels) == len(images) and int(images.labels.min()) >= 0
        assert images.classes is None or int(images.labels.max()) < len(images.classes)


def _store_digests(tree: dict[str, Any], files: dict[str, bytes]) -> None:
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        for name in tree["files"]:
            tree["files"][name]["bytes"] = len(files[name])
            if name != "images.u8":
                tree["files"][name]["sha256"] = hashlib.sha256(files[name]).hexdigest()
    with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):
        start = 0
        for chunk in tree["chunks"]:
            length = chunk[0] if chunk[0] >= 0 else len(files["images.u8"])
            chunk[1] = hashlib.sha256(files["images.u8"][start : start + length]).hexdigest()
            start += length
    tree.pop("self", None)
    tree["self"] = digest_of(tree)


def continue_packing(content: bytes, folder: Path) -> None:
    """Continue an interrupted packing from a journal, and open the store."""
    files = split_files(content, ("journal.jsonl", "images.u8"))
    photos = folder / "photos"
    write_files(photos, {f"{i}.png": png for i, png in enumerate(_pngs())})
    for i in range(len(_pngs())):
        os.utime(photos / f"{i}.png", ns=(10**18, 10**18))
    lines, start = files.get("journal.jsonl", b"").split(b"\n"), 0
    for number, line in enumerate(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            tree = json.loads(line)
            pixels = files["images.u8"][start : start + tree["bytes"]]
            tree["sha256"], start = hashlib.sha256(pixels).hexdigest(), start + tree["bytes"]
            lines[number] = json.dumps(tree).encode()
    files["journal.jsonl"] = b"\n".join(lines)
    write_files(folder, {f"store/train.part/{name}": text for name, text in files.items()})
    with cache_in(folder), mock.patch("kontrast.data.store_writer.CHUNK", 2), in_folder(folder):
        pack("photos", "store", workers=1)
        use_images(open_data("store"))


@functools.cache
def _pngs() -> list[bytes]:
    return [encoded(picture(seed, 2), "PNG") for seed in range(4)]


# Embeddings


def read_vectors(content: bytes, folder: Path) -> None:
    """Read a .npy file with its names."""
    files = split_files(content, ("v.npy", "v.names.jsonl"))
    write_files(folder, files)
    check_vectors(folder / "v.npy")


def read_parquet_vectors(content: bytes, folder: Path) -> None:
    """Read a .parquet file."""
    (folder / "v.parquet").write_bytes(content)
    check_vectors(folder / "v.parquet")


def check_vectors(path: Path) -> None:
    found = read_embeddings(path)
    assert found.vectors.ndim == 2 and len(found) == len(found.names) > 0
    assert all(isinstance(name, str) for name in found.names) and isinstance(found.encoder, str | None)
    rows, _ = found.sample(5)
    assert bool(torch.isfinite(rows).all()) and bool(torch.isfinite(found[:5]).all())


# Tools


def _with_digests(text: bytes, correct: Callable[..., None], files: dict[str, bytes]) -> bytes:
    """Return JSON with right digests; text that is not a JSON object stays as it is."""
    with contextlib.suppress(ValueError, RecursionError):
        tree = json.loads(text)
        if isinstance(tree, dict):
            correct(tree, files)
            return json.dumps(tree).encode()
    return text


@contextlib.contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    with mock.patch.dict(os.environ, KONTRAST_CACHE=str(folder / "cache")):
        yield


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    old = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(old)


OWN = (KontrastError,)
PIL_FILES = tuple(f"/PIL/{name}" for name in ("Image.py", "ImageFile", "Jpeg", "Png", "Webp", "Gif", "Bmp", "Tiff"))
MAGIC = [
    b"\xff\xd8\xff\xe0", b"\xff\xe1", b"Exif\0\0", b"\xff\xc0", b"\xff\xda", b"\x89PNG\r\n\x1a\n", b"IHDR", b"IDAT",
    b"PLTE", b"tRNS", b"eXIf", b"IEND", b"acTL", b"fdAT", b"iCCP", b"zTXt", b"GIF89a", b",", b";", b"!\xf9", b"BM",
    b"II*\0", b"MM\0*", b"II+\0", b"RIFF", b"WEBP", b"VP8 ", b"VP8L", b"VP8X", b"ANIM", b"\x12\x01\x03\0", b"\xff\xee",
]  # fmt: skip
ALL_JSON = [*JSON, *NUMBERS, *KEYS_OF_RUNS]
TARGETS: dict[str, Target] = {
    target.name: target
    for target in [
        Target("recipes", read_recipe_file, OWN, RECIPE_TOKENS, ("/kontrast/", "/tomllib/")),
        Target("images", decode_image, (BadImage,), MAGIC, ("/kontrast/", *PIL_FILES)),
        Target("shards", read_shard, OWN, [b"ustar\x0000", b"ustar  \0", b"../", b"/", b".cls", b".png", b"0000644\0",
               b"path=", b"30 size=", b"GNU.sparse.", b"x", b"L", b"1", b"5", *NUMBERS],
               ("/kontrast/", "/tarfile.py")),
        Target("encoders", read_encoder, OWN, [*ALL_JSON, *RECIPE_TOKENS, b'"F32"', b'"BF16"', b'"data_offsets"',
               b'"shape"', b"__metadata__"]),
        Target("checkpoints", restore_checkpoint, OWN, [*ALL_JSON, b'"names"', b'"count"', b'"best"', b'"owed"',
               b'"failures"', b'"world"', b'"I64"', b'"BOOL"']),
        Target("metrics", read_metrics, OWN, ALL_JSON),
        Target("stores", read_store, OWN, [*ALL_JSON, b'"files"', b'"chunks"', b'"channels"', b'"origin"', b"../"]),
        Target("journals", continue_packing, OWN, [*ALL_JSON, b'"bytes"', b'"sizes"', b'"kept"', b'"bad"', b'"notes"']),
        Target("vectors", read_vectors, OWN, [*ALL_JSON, b"<f4", b"|O", b">f8", b"'shape'", b"(,)", b"fortran_order",
               b"True", b"(((", b"lambda:0", b"<U9", b"\x93NUMPY\x03\x00"], ("/kontrast/", "/numpy/lib/")),
        Target("parquet", read_parquet_vectors, OWN, [b"PAR1", b"vector", b"path", b"kontrast", *NUMBERS],
               needs="pyarrow"),
        Target("reports", write_report, (ReportError, *OWN), ALL_JSON),
    ]
}  # fmt: skip


# The first inputs


def first_inputs() -> dict[str, dict[str, bytes]]:
    """Return one or more small whole files for each target, by name."""
    run = {"version": 1, "data": {"name": "photos", "images": 4, "channels": 3}, "seconds": 1.5, "steps": 2,
           "data_place": {"source": "photos", "place": "photos"}, "finished": "2026-01-31T12:00:00+0000"}  # fmt: skip
    return {
        "recipes": _recipes(),
        "images": {f"{form.lower()}-{mode}": content for form, mode, content in _images()},
        "shards": {"labeled": _shard(), "names": _shard(long=True)},
        "encoders": {"whole": join_files(_encoder_files(run))},
        "checkpoints": {"whole": join_files(_checkpoint_files())},
        "metrics": {"whole": _metrics(), "cut": _metrics()[:-9] + b"\n[]\n\xff\n"},
        "stores": _stores(),
        "journals": {"one-chunk": _journal()},
        "vectors": {"named": _vectors(), "plain": _vectors(np.arange(6, dtype=">i2").reshape(2, 3))},
        "parquet": _parquet(),
        "reports": {"run": join_files(_report_files(run)), "study": join_files(_study_files())},
    }


def _recipes() -> dict[str, bytes]:
    names = ("quickstart", "cifar10/cacr-moco")
    texts = {name: (FOLDER / f"{name}.toml").read_bytes() for name in names}
    overrides = b"training.lr=0.1\nviews.crop_scale=[0.2, 1]\nteacher=false\nobjective.name=dcl"
    inputs = {
        name.replace("/", "-"): join_files({"recipe.toml": text, "overrides": overrides})
        for name, text in texts.items()
    }
    return inputs | {"tiny": join_files({"recipe.toml": TINY_RECIPE.encode(), "overrides": b""})}


def _images() -> Iterator[tuple[str, str, bytes]]:
    small = picture(0, 5, 7)
    for form in FORMATS:
        yield form, "rgb", encoded(small, form)
    exif = Image.Exif()
    exif[0x0112] = 6
    yield "JPEG", "turned", encoded(small.convert("L"), "JPEG", exif=exif, quality=10)
    yield "PNG", "palette", encoded(small.quantize(4), "PNG", transparency=1)
    yield "PNG", "deep", encoded(Image.fromarray(np.arange(35, dtype=np.uint16).reshape(5, 7)), "PNG")
    yield "TIFF", "float", encoded(Image.fromarray(np.ones((5, 7), dtype=np.float32)), "TIFF", compression="tiff_lzw")
    frames = [picture(seed, 4).quantize(4) for seed in range(2)]
    yield "GIF", "frames", encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def _shard(long: bool = False) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        head = "a" * 101 + "/" if long else ""
        members = [
            (f"{head}0.png", _pngs()[0]),
            (f"{head}0.cls", b"1"),
            (f"{head}1.png", _pngs()[1]),
            ("../1.txt", b"x"),
        ]
        content = write_tar(Path(place) / "s.tar", members).read_bytes()
    return content[: len(content.rstrip(b"\0")) // 512 * 512 + 512 * 3]


def _encoder_files(run: dict[str, Any]) -> dict[str, bytes]:
    import gzip

    from kontrast.training.learner import build_student

    encoder = build_student(settings.read_recipe(settings.parse_toml(TINY_RECIPE, "tiny")), 3).encoder
    listing = gzip.compress(b'0123456789abcdef "a.png"\n', mtime=0)
    weights = checkpoints.to_safetensors(encoder.state_dict())
    text = json.dumps(run).encode()
    return {
        "recipe.toml": TINY_RECIPE.encode(),
        "run.json": text,
        "files.txt.gz": listing,
        "encoder.safetensors": weights,
    }


def _checkpoint_files() -> dict[str, bytes]:
    loop = tiny_loop()
    tensors = {f"learner.{name}": tensor for name, tensor in loop.learner.state_dict().items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in loop.optimizer.state_dict().items()}
    tensors["window"] = torch.zeros(2)
    state = {"step": 2, "names": ["attraction", "repulsion"], "count": 1, "best": {"step": 2, "knn": 0.5},
             "owed": False, "failures": []}  # fmt: skip
    manifest = {
        "schema": 1,
        "step": 2,
        "files": {name: {"sha256": "", "bytes": 1} for name in CHECKPOINT[1:]},
        **loop.facts(),
    }
    texts = {"manifest.json": json.dumps(manifest).encode(), "state.json": json.dumps(state).encode()}
    return texts | {"state.safetensors": checkpoints.to_safetensors(tensors)}


def _metrics() -> bytes:
    records: list[dict[str, Any]] = [{"step": s, "epoch": s / 2, "loss": 5.0 - s, "lr": 0.1} for s in range(1, 5)]
    records.insert(2, {"step": 2, "epoch": 1, "knn": 0.4, "effective_rank": 3.5})
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _stores() -> dict[str, bytes]:
    import tempfile

    stores = {}
    with tempfile.TemporaryDirectory() as place, in_folder(Path(place)):
        for kind, sides in (("equal", (2, 2)), ("ragged", (2, 3))):
            for number in range(4):
                folder = Path(kind, f"class{number % 2}")
                folder.mkdir(parents=True, exist_ok=True)
                picture(number, sides[number % 2]).save(folder / f"{number}.png")
                os.utime(folder / f"{number}.png", ns=(10**18, 10**18))
            split = pack(kind, f"{kind}-store", test_share=0, workers=1)[0]
            stores[kind] = join_files({name: (split / name).read_bytes() for name in STORE if (split / name).exists()})
    return stores


def _journal() -> bytes:
    """Return the journal of a packing that was interrupted after the first of two chunks."""
    import tempfile

    kept: dict[str, bytes] = {}

    def interrupt(done: int, total: int) -> None:
        work = Path("store/train.part")
        kept.update({name: (work / name).read_bytes() for name in ("journal.jsonl", "images.u8")})
        raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as place, in_folder(Path(place)):
        write_files(Path("photos"), {f"{i}.png": png for i, png in enumerate(_pngs())})
        for i in range(len(_pngs())):
            os.utime(f"photos/{i}.png", ns=(10**18, 10**18))
        with mock.patch("kontrast.data.store_writer.CHUNK", 2), contextlib.suppress(KeyboardInterrupt):
            pack("photos", "store", workers=1, progress=interrupt)
    return join_files(kept)


def _vectors(values: np.ndarray | None = None) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones((3, 2), dtype=np.float32) if values is None else values)
    if values is not None:
        return join_files({"v.npy": buffer.getvalue()})
    names = b"".join(json.dumps({"id": i, "path": f"{i}.png", "encoder": "ab"}).encode() + b"\n" for i in range(3))
    return join_files({"v.npy": buffer.getvalue(), "v.names.jsonl": names})


def _parquet() -> dict[str, bytes]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return {}
    columns = {"vector": [[1.0, 2.0], [0.5, 1.0]], "path": ["a", "b"], "label": [0, 1]}
    table = pyarrow.table(columns).replace_schema_metadata({"kontrast": '{"encoder": "ab"}'})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="NONE", use_dictionary=False, write_statistics=False)
    return {"two-rows": buffer.getvalue()}


def _report_files(run: dict[str, Any]) -> dict[str, bytes]:
    sprite = encoded(picture(0, 4), "PNG")
    point = {"x": 0.5, "y": 0.1, "label": 1, "name": "a.png", "tile": 0}
    gallery = {"version": 1, "points": [point], "queries": [{**point, "neighbours": [{**point, "similarity": 0.9}]}],
               "tile": 4, "columns": 1, "count": 1, "classes": ["cat", "dog"], "split": "test",
               "sprite_sha256": ""}  # fmt: skip
    probe = {"probe": "knn", "features": "trained", "accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 9, "seed": 0,
             "protocol": {"k": 20}}  # fmt: skip
    plot = {"id": "spectrum", "name": "Spectrum", "title": "t", "note": "n", "kind": "line", "x": {"label": "i"},
            "y": {"label": "v", "format": "number"},
            "series": [{"name": "s", "x": [1, 2], "y": [0.5, 0.25]}]}  # fmt: skip
    lens = {"version": 1, "plots": [plot], "numbers": [], "alignment": 0.5}
    trees = {"run.json": run, "probes.json": {"version": 1, "probes": [probe, {**probe, "seed": 1}]}, "lens.json": lens}
    texts = {name: json.dumps(tree).encode() for name, tree in (trees | {"gallery.json": gallery}).items()}
    metrics = {"metrics.jsonl": _metrics(), "speed.jsonl": b'{"step": 1, "epoch": 1, "images_per_second": 9}\n'}
    return {"recipe.toml": TINY_RECIPE.encode(), **texts, **metrics, "gallery.png": sprite}


def _study_files() -> dict[str, bytes]:
    table = {"title": "t", "note": "n", "columns": ["a", "b"], "rows": [["x", "1"], ["y", "2"]]}
    study = {"version": 1, "kind": "comparison", "title": "t", "verdict": "v", "tables": [table], "plots": []}
    return {"metrics.jsonl": _metrics(), "comparison.json": json.dumps(study).encode()}


def write_corpus() -> None:
    """Write the first inputs that are missing; the others, and finds, stay."""
    for target, inputs in first_inputs().items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, content in inputs.items():
            if not (CORPUS / target / name).exists():
                (CORPUS / target / name).write_bytes(content)


def main(arguments: Sequence[str] | None = None) -> None:
    import argparse
    import platform
    import tempfile
    from datetime import UTC, datetime

    from support.learning_fuzzer import fuzz_target, limited_memory, minimize

    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*", default=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("finds"))
    parser.add_argument("--write-corpus", action="store_true")
    given = parser.parse_args(arguments)
    if given.write_corpus:
        write_corpus()
        return
    torch.set_num_threads(1)
    for name in given.targets:
        target = TARGETS[name]
        if not target.can_run():
            print(f"{name}: needs a package that is not installed")
            continue
        with tempfile.TemporaryDirectory() as place, limited_memory(16 << 30):
            outcome = fuzz_target(target, Path(place), seed=given.seed, seconds=60 * given.minutes)
            line = {
                "target": name, "seed": given.seed, "executions": outcome.executions,
                "minutes": round(outcome.seconds / 60, 1), "covered_by_seeds": outcome.covered_by_seeds,
                "covered": outcome.covered, "kept": len(outcome.kept), "finds": sorted(outcome.finds),
                "answers": outcome.answers, "python": platform.python_version(), "torch": torch.__version__,
                "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            }  # fmt: skip
            print(json.dumps(line), flush=True)
            given.out.mkdir(parents=True, exist_ok=True)
            for number, find in enumerate(outcome.finds.values()):
                content = minimize(target, find.content, Path(place), find.place)
                stem = given.out / f"{name}-{given.seed}-{number}"
                stem.with_suffix(".input").write_bytes(content)
                stem.with_suffix(".txt").write_text(f"{find.place}\n{find.problem}\n")


if __name__ == "__main__":
    main()
