"""A folder of images that also contains `numpy.py`, `PIL/`, `sitecustomize.py` and the like: none of it ever runs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from kontrast import plugins
from kontrast.config.recipe import Recipe
from kontrast.data.decode import PLAIN
from kontrast.data.decode_workers import IN_PROCESS, Decoders
from kontrast.data.listing import scan_folder
from kontrast.papers.parallel_runs import ParallelRuns
from kontrast.studies.cells import Cell

from support.command_line import TINY
from support.traps import set_traps, sprung

COMMAND = str(Path(sys.executable).with_name("kontrast"))
MODULE = [sys.executable, "-m", "kontrast"]
TABLE = """
title = "A tiny table"
paper = "nobody"
about = "Digits."
probes = ["knn"]
settings = ["data.source=digits", "training.max_steps=2", "training.batch=16", "encoder.width=8", "evaluation.every=0"]

[[groups]]
name = "losses"
title = "Losses"
where = "figure 0"
cells = [
    { name = "nt", label = "NT-Xent", recipe = "quickstart" },
    { name = "dcl", label = "DCL", recipe = "digits/dcl" },
]
"""


def pictures(folder: Path, count: int) -> Path:
    folder.mkdir()
    Image.new("RGB", (8, 8), "red").save(folder / "0.png")
    content = (folder / "0.png").read_bytes()
    for number in range(1, count):
        (folder / f"{number}.png").write_bytes(content)
    return folder


def run_inside(folder: Path, *command: str, **environment: str) -> str:
    """Run a command in a folder and return what it printed; it must succeed."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")} | environment
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.fault(41)
def test_decoding_processes_import_nothing_beside_the_data(tmp_path, monkeypatch):
    """The images are decoded, from a program in the folder of the data too, whose path a script puts first."""
    folder = pictures(tmp_path / "pictures", 8)
    items = scan_folder(str(folder)).items
    log = set_traps(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", str(folder), *sys.path])
    decoders = Decoders(PLAIN, 2)
    try:
        assert len(decoders.submit(items).result().kept) == 8
    finally:
        decoders.close()
    assert sprung(log) == []


@pytest.mark.fault(42)
@pytest.mark.parametrize(
    ("command", "paths", "count"),
    [
        pytest.param(MODULE, None, 8, id="python -m"),
        pytest.param(MODULE, None, IN_PROCESS + 8, id="python -m, processes", marks=pytest.mark.slow),
        pytest.param([COMMAND], None, IN_PROCESS + 8, id="kontrast", marks=pytest.mark.slow),
        pytest.param([COMMAND], os.pathsep, IN_PROCESS + 8, id="empty PYTHONPATH entry", marks=pytest.mark.slow),
    ],
)
def test_commands_import_nothing_beside_the_data(tmp_path, command, paths, count):
    """`pack .` inside the folder works, in this process and, with many images, in the decoding processes."""
    folder = pictures(tmp_path / "pictures", count)
    log = set_traps(folder, standard_library=paths is None)
    run_inside(folder, *command, "pack", ".", str(tmp_path / "store"), **({"PYTHONPATH": paths} if paths else {}))
    assert (tmp_path / "store" / "train" / "store.json").exists()
    assert sprung(log) == (["sitecustomize"] if paths else [])  # Python's own start imports it, once


@pytest.mark.slow
@pytest.mark.fault(42)
def test_ranks_import_nothing_beside_the_data(tmp_path):
    """`torchrun -m kontrast pretrain .` trains."""
    folder = pictures(tmp_path / "pictures", 64)
    log = set_traps(folder)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    start = [torchrun, "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    recipe = ["--recipe", "quickstart", "--device", "cpu", "--no-probes", "data.pack=false"]
    run_inside(folder, *start, "-m", "kontrast", "pretrain", ".", *recipe, *TINY, "--out", str(tmp_path / "run"))
    assert (tmp_path / "run" / "encoder.safetensors").exists()
    assert sprung(log) == []


@pytest.mark.fault(44)
def test_processes_of_a_study_import_nothing_beside_the_data(tmp_path, monkeypatch):
    """The processes of `reproduce --jobs` start, in the folder of the data and from a program that lies there."""
    folder = pictures(tmp_path / "pictures", 1)
    log = set_traps(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", str(folder), *sys.path])
    said: list[str] = []
    study = ParallelRuns(lambda cell: ["--list"], tmp_path, at_once=1, say=said.append, variables={})
    assert study.run([Cell("one", Recipe(), tmp_path, tmp_path / "recipe.toml", tmp_path / "record.json")]) == [], said
    assert sprung(log) == []


@pytest.mark.slow
@pytest.mark.fault(44)
def test_reproduce_with_jobs_imports_nothing_beside_the_data(tmp_path):
    """`reproduce --jobs 2` inside such a folder trains its cells."""
    folder = pictures(tmp_path / "pictures", 1)
    log = set_traps(folder)
    (tmp_path / "tiny.toml").write_text(TABLE)
    words = [str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    run_inside(folder, *MODULE, "reproduce", *words, "--device", "cpu", "--jobs", "2")
    assert (tmp_path / "results" / "tiny.json").exists()
    assert sprung(log) == []


@pytest.mark.fault(43)
def test_import_loads_only_the_named_file(tmp_path, monkeypatch):
    """No library finds a file beside it, for instance for an optional import; a relative import does."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    log = set_traps(folder)
    (folder / "optional_library.py").write_text("raise RuntimeError('imported by accident')\n")
    (folder / "own_helper.py").write_text("answer = 42\n")
    (folder / "own_names.py").write_text("from .own_helper import answer\n")
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.chdir(folder)
    try:
        plugins.import_files([folder / "own_names.py"])
        assert sys.modules["own_names"].answer == 42
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("optional_library")
    finally:
        for name in ("own_names", "own_names.own_helper"):
            sys.modules.pop(name, None)
    assert sprung(log) == []
