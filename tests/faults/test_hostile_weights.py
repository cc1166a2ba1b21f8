"""Weights from strangers: pickles under any name, damaged tensors, recipes that name code, paths and addresses."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from kontrast.errors import CheckpointError
from kontrast.training.checkpoints import read_weights

from support import tiny_run
from support.command_line import kontrast, one_line


class Payload:
    """Create a folder, if anything ever unpickles this."""

    def __init__(self, canary: Path):
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


@pytest.fixture
def run(tmp_path) -> Path:
    return tiny_run.copy(tmp_path)


def commands(run: Path, tmp_path: Path) -> list[list[str]]:
    """List every command that opens a run's weights."""
    picture = next(tiny_run.images().rglob("*.png"))
    on = ["--device", "cpu"]
    return [
        ["probe", str(run), "knn", *on],
        ["embed", str(run), str(tiny_run.images()), "--out", str(tmp_path / "vectors.npy"), *on],
        ["neighbors", str(run), str(picture), *on],
        ["duplicates", str(run), *on],
        ["export", str(run), "--out", str(tmp_path / "exported.safetensors")],
    ]


@pytest.mark.fault(32)
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_pickle_named_safetensors_is_never_unpickled(run, tmp_path, how):
    """Exit 4 from every command that opens it; the payload did not run."""
    canary = tmp_path / "canary"
    if how == "pickle":
        (run / "encoder.safetensors").write_bytes(pickle.dumps(Payload(canary)))
    else:
        torch.save({"weight": torch.ones(2), "evil": Payload(canary)}, run / "encoder.safetensors")
    for command in commands(run, tmp_path):
        one_line(kontrast(*command), 4, "encoder.safetensors", "execute code")
    assert not canary.exists()
    assert not (tmp_path / "vectors.npy").exists() and not (tmp_path / "exported.safetensors").exists()


@pytest.mark.fault(32)
def test_pickled_checkpoint_is_never_unpickled(run, tmp_path):
    """Resuming from pickles with correct hashes is exit 4; the payload did not run."""
    canary = tmp_path / "canary"
    for place in (run / "checkpoints").glob("step-*"):
        evil = pickle.dumps(Payload(canary))
        (place / "state.safetensors").write_bytes(evil)
        manifest = json.loads((place / "manifest.json").read_text())
        manifest["files"]["state.safetensors"]["sha256"] = hashlib.sha256(evil).hexdigest()
        (place / "manifest.json").write_text(json.dumps(manifest))
    done = kontrast("pretrain", "--resume", "--no-probes", "--device", "cpu", "--out", str(run))
    one_line(done, 4, "checkpoint")
    assert not canary.exists()


@pytest.mark.fault(32)
@pytest.mark.parametrize("name", ["evil.pt", "evil.pth", "evil.ckpt", "evil.pt2", "evil.pkl", "evil.bin", "dcp"])
def test_checkpoints_of_other_programs_are_refused(tmp_path, name):
    """Exit 4 without reading them; the payload did not run."""
    place, canary = tmp_path / name, tmp_path / "canary"
    if name == "dcp":
        place.mkdir()
        (place / ".metadata").write_bytes(pickle.dumps(Payload(canary)))
        (place / "__0_0.distcp").write_bytes(pickle.dumps(Payload(canary)))
    else:
        torch.save(Payload(canary), place)
    picture = next(tiny_run.images().rglob("*.png"))
    for command in (
        ["probe", str(place)],
        ["export", str(place)],
        ["embed", str(place), str(tiny_run.images()), "--out", str(tmp_path / "v.npy")],
        ["neighbors", str(place), str(picture)],
        ["duplicates", str(place)],
        ["transfer", str(place)],
        ["lens", str(place)],
        ["report", str(place)],
    ):
        one_line(kontrast(*command), 4, "execute code")
    assert not canary.exists()


@pytest.mark.fault(32)
def test_pickled_arrays_and_stores_are_never_unpickled(run, tmp_path):
    """Exit 3; the payload did not run."""
    import numpy as np

    canary = tmp_path / "canary"
    np.save(tmp_path / "v.npy", np.array([[Payload(canary)]], dtype=object), allow_pickle=True)
    one_line(kontrast("lens", str(tmp_path / "v.npy")), 3, "v.npy")
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(Payload(canary)))
    one_line(kontrast("lens", str(tmp_path / "raw.npy")), 3, "raw.npy")
    store = tmp_path / "store" / "train"
    store.mkdir(parents=True)
    (store / "store.json").write_bytes(pickle.dumps(Payload(canary)))
    one_line(kontrast("pretrain", str(tmp_path / "store"), "--out", str(tmp_path / "r")), 3, "store.json")
    assert not canary.exists()


def malformed(whole: bytes) -> dict[str, bytes]:
    """Make malformed safetensors of every kind that FAULTS.md lists."""
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    names = [n for n in header if n != "__metadata__"]

    def with_header(change, data: bytes = whole[8 + length :]) -> bytes:
        tree = json.loads(json.dumps(header))
        change(tree)
        text = json.dumps(tree).encode()
        return struct.pack("<Q", len(text)) + text + data

    def offsets(name: str, begin: int, end: int):
        return lambda tree: tree[name].update(data_offsets=[begin, end])

    return {
        "empty": b"",
        "cut-in-the-header": whole[: 8 + length // 2],
        "cut-in-the-data": whole[:-7],
        "longer": whole + b"\0" * 64,
        "huge-header": struct.pack("<Q", 2**62) + whole[8:],
        "long-header": struct.pack("<Q", 200_000_000) + whole[8:],
        "not-json": whole[:8] + b"\xff" * length + whole[8 + length :],
        "deep-json": struct.pack("<Q", 200_000) + b"[" * 200_000,
        "overlap": with_header(lambda t: t[names[1]].update(data_offsets=t[names[0]]["data_offsets"])),
        "overflow": with_header(offsets(names[0], 0, 2**63 - 1)),
        "backwards": with_header(offsets(names[0], 80, 8)),
        "huge-shape": with_header(lambda t: t[names[0]].update(shape=[2**40, 2**40])),
        "negative-shape": with_header(lambda t: t[names[0]].update(shape=[-1])),
        "unknown-type": with_header(lambda t: t[names[0]].update(dtype="PICKLE")),
        "a-list": struct.pack("<Q", 2) + b"[]",
    }


SHAPES = sorted(malformed(save({"a": torch.ones(2), "b": torch.ones(2)})))


@pytest.mark.fault(33)
@pytest.mark.parametrize("shape", SHAPES)
def test_malformed_safetensors(run, tmp_path, shape):
    """Exit 4 names the file; no more memory is allocated than the file is long."""
    path = run / "encoder.safetensors"
    content = malformed(path.read_bytes())[shape]
    path.write_bytes(content)
    one_line(kontrast("probe", str(run), "knn", "--device", "cpu"), 4, "encoder.safetensors")
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        read_weights(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(content) + 200_000


@pytest.mark.fault(33)
@pytest.mark.parametrize("change", ["missing", "extra", "shape", "type", "nan"])
def test_weights_that_do_not_fit_the_recipe(run, change):
    """Exit 4 for the weights of another network and for weights that are not numbers."""
    from safetensors.torch import load_file, save_file

    path = run / "encoder.safetensors"
    tensors = load_file(path)
    first = next(k for k, t in tensors.items() if t.is_floating_point() and t.ndim > 1)
    if change == "missing":
        del tensors[first]
    elif change == "extra":
        tensors["more"] = torch.ones(1)
    elif change == "shape":
        tensors[first] = tensors[first].flatten()
    elif change == "type":
        tensors[first] = tensors[first].long()
    else:
        tensors[first] = torch.full_like(tensors[first], float("nan"))
    save_file(tensors, path)
    one_line(kontrast("probe", str(run), "knn", "--device", "cpu"), 4, "encoder.safetensors")


def change_recipe(run: Path, line: str, section: str = "encoder") -> None:
    """Change one line of a run's recipe as an attacker would, with a matching checksum or without any."""
    facts = json.loads((run / "run.json").read_text())
    facts.pop("recipe_sha256", None)
    (run / "run.json").write_text(json.dumps(facts))
    recipe = (run / "recipe.toml").read_text()
    assert f"[{section}]\n" in recipe
    key = line.split(" ")[0]
    recipe = re.sub(rf"(\[{section}\]\n(?:[^\[]*\n)*?){key} = [^\n]*\n", r"\1", recipe)
    (run / "recipe.toml").write_text(recipe.replace(f"[{section}]\n", f"[{section}]\n{line}\n"))


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("encoder", 'name = "os:system"'),
        ("encoder", 'name = "kontrast.cli:main"'),
        ("encoder", 'name = "../../../../etc/passwd"'),
        ("encoder", 'name = "https://example.com/model.pt"'),
        ("encoder", 'name = "timm:hf-hub:someone/evil"'),
        ("encoder", 'name = "timm:local-dir:/etc"'),
        ("encoder", 'name = "torchvision:../../evil"'),
        ("encoder", '_target_ = "os.system"'),
        ("head", 'name = "builtins.exec"'),
        ("objective", 'name = "__import__"'),
        ("views", 'policy = "/etc/passwd"'),
    ],
)
def test_recipe_can_only_name_registered_things(run, tmp_path, section, line):
    """Exit 2 says what is allowed; no name in a recipe is imported or downloaded."""
    change_recipe(run, line, section)
    word = line.split(" ")[0] if line.startswith("_") else line.split('"')[1]
    for command in (["probe", str(run), "knn"], ["pretrain", "--resume", "--out", str(run)]):
        if not (section == "objective" and command[0] == "probe"):  # a probe builds no objective
            one_line(kontrast(*command, "--device", "cpu"), 2, word)


@pytest.mark.fault(34)
def test_run_folder_can_not_import_code(run, tmp_path):
    """Exit 2 for an encoder that code in the run folder would register; that code did not run."""
    code = f"import os; os.mkdir({str(tmp_path / 'canary')!r})\n"
    for name in ("mine.py", "sitecustomize.py", "conftest.py"):
        (run / name).write_text(code)
    info = json.loads((run / "run.json").read_text())
    words = {"command": "kontrast --import mine.py pretrain", "import": "mine.py", "KONTRAST_IMPORT": "mine.py"}
    (run / "run.json").write_text(json.dumps({**info, **words}))
    change_recipe(run, 'name = "mine"')
    one_line(kontrast("probe", str(run), "knn", "--device", "cpu"), 2, "'mine'", "--import FILE.py")
    recipe = run / "recipe.toml"
    recipe.write_text(f'import = "{run / "mine.py"}"\n{recipe.read_text()}')
    one_line(kontrast("pretrain", "--recipe", str(recipe), "--out", str(tmp_path / "new")), 2, "'import'")
    assert not (tmp_path / "canary").exists()


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    "line",
    [
        "pretrained = true",
        'checkpoint_path = "CANARY.pt"',
        'pretrained_cfg_overlay = { file = "CANARY.pt" }',
        'pretrained_cfg = { url = "http://127.0.0.1:9/x" }',
        'cache_dir = "CANARY"',
        'weights = "DEFAULT"',
        'weights_backbone = "DEFAULT"',
    ],
)
@pytest.mark.parametrize("library", ["timm:resnet18", "torchvision:resnet18"])
def test_encoders_of_other_libraries_load_no_weights(run, tmp_path, monkeypatch, library, line):
    """Exit 2 if a recipe asks another library for pretrained weights; no request is made and no file opened."""
    canary = tmp_path / "canary"
    torch.save(Payload(canary), tmp_path / "CANARY.pt")
    import socket

    requests: list[object] = []
    monkeypatch.setattr(
        socket.socket, "connect", lambda self, address: requests.append(address) or (_ for _ in ()).throw(OSError)
    )
    change_recipe(run, f'name = "{library}"')
    change_recipe(run, line.replace("CANARY", str(tmp_path / "CANARY")))
    one_line(kontrast("probe", str(run), "knn", "--device", "cpu"), 2, line.split(" ")[0])
    assert not requests and not canary.exists()


@pytest.mark.fault(34)
def test_run_folder_from_another_machine(run, tmp_path):
    """Exit 3 names the missing data and --data; with --data the run can be probed, and nothing is written there."""
    change_recipe(run, 'source = "/nowhere/at/all"', "data")
    one_line(kontrast("probe", str(run), "knn", "--device", "cpu"), 3, "/nowhere/at/all", "--data")
    one_line(kontrast("lens", str(run), "--device", "cpu"), 3, "/nowhere/at/all")
    one_line(kontrast("pretrain", "--resume", "--device", "cpu", "--out", str(run)), 3, "/nowhere/at/all")
    before = {p: p.stat().st_mtime_ns for p in tiny_run.images().rglob("*")}
    done = kontrast("probe", str(run), "knn", "--data", str(tiny_run.images()), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert {p: p.stat().st_mtime_ns for p in tiny_run.images().rglob("*")} == before
    change_recipe(run, 'source = "pipe:touch owned"', "data")
    done = kontrast("probe", str(run), "knn", "--device", "cpu")
    assert done.returncode in (2, 3) and not Path("owned").exists()


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b'{"data": 3}',
        b'{"data": {"channels": "x"}}',
        b'{"data": {"channels": -1}}',
        b'{"data": {"channels": 1000000000}}',
        b'{"data": {"channels": 3.5}}',
        b'{"version": "x"}',
        b'{"version": 99}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=lambda c: c[:30].decode("ascii", "replace"),
)
def test_run_json_with_any_content(run, tmp_path, content):
    """Exit 4 names run.json, from every command that needs it; the report still shows the rest."""
    (run / "run.json").write_bytes(content)
    for command in commands(run, tmp_path):
        one_line(kontrast(*command), 4, "run.json" if content != b'{"version": 99}' else "newer")
    assert kontrast("report", str(run)).returncode == 0


@pytest.mark.fault(34)
def test_compressed_bomb_as_listing(run):
    """Exit 3 with little memory, though a few kilobytes of files.txt.gz would expand to a hundred megabytes."""
    import gzip
    import io

    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb") as file:
        for _ in range(100):
            file.write(b"\0" * 1_000_000)
    (run / "files.txt.gz").write_bytes(buffer.getvalue())
    facts = json.loads((run / "run.json").read_text())
    facts["data"]["fingerprint"] = "another"
    (run / "run.json").write_text(json.dumps(facts))
    tracemalloc.start()
    done = kontrast("pretrain", "--resume", "--no-probes", "--device", "cpu", "--out", str(run))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    one_line(done, 3)
    assert peak < 60_000_000


@pytest.mark.fault(34)
def test_package_never_unpickles_or_evaluates():
    """There is no pickle, eval or exec in the source, and torch.load only where it refuses all but tensors."""
    import ast

    import kontrast

    banned = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    for path in Path(kontrast.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not {n.split(".")[0] for n in names} & banned, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called == "torch.load" and path.name == "weight_files.py":
                    assert "weights_only=True" in ast.unparse(node)
                    continue
                assert called not in ("eval", "exec", "compile", "torch.load", "os.system", "os.popen"), (path, called)
                assert not any(k.arg == "allow_pickle" and ast.unparse(k.value) == "True" for k in node.keywords), path
