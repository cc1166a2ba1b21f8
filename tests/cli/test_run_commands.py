"""The commands lens, embed, neighbors, duplicates and export, as a person or a program calls them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import typer

from kontrast.cli import main as cli
from kontrast.cli import runs as commands
from kontrast.data.pack import pack

from support import tiny_run


@pytest.fixture
def command(monkeypatch, capsys):
    """`command("lens", run)` gives exit code, standard output and standard error."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    commands.register(app)
    monkeypatch.setattr(cli, "app", app)

    def call(*words):
        code = cli.run([str(w) for w in words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_lens_writes_numbers_and_page(command, tmp_path):
    run = tiny_run.copy(tmp_path)
    code, out, _ = command("lens", run, "--images", 20, "--augmentations", 3)
    assert code == 0 and "conditional entropy, maximum" in out and "effective rank" in out
    tree = json.loads((run / "lens.json").read_text())
    page = (run / "report.html").read_text()
    assert tree["plots"][0]["title"].split(" nats")[0] in page


def test_embed_then_neighbors_then_lens_on_the_file(command, tmp_path):
    run, out = tiny_run.trained(), tmp_path / "v.npy"
    code, text, _ = command("embed", run, tiny_run.images(), "--out", out, "--json")
    assert code == 0
    assert json.loads(text) == {"out": str(out), "images": tiny_run.IMAGES, "width": 32, "skipped": 0}
    image = next(tiny_run.images().rglob("*.png"))
    code, text, _ = command("neighbors", run, image, "--embeddings", out, "-k", 2, "--json")
    found = json.loads(text)["neighbors"]
    assert code == 0 and len(found) == 2 and image.name in found[0]["name"]
    code, text, _ = command("neighbors", run, image, "--embeddings", out, "-k", 2)
    assert code == 0 and text.splitlines()[0].split() == ["1.0000", found[0]["name"]]
    code, text, _ = command("lens", out, "--json")
    assert code == 0 and json.loads(text)["numbers"]["effective rank"] > 1
    assert (tmp_path / "v.npy.lens" / "report.html").is_file()


def test_embed_of_a_folder_of_links_explains_what_to_do(command, tmp_path):
    """embed has no --follow-links; pack has, and embed reads the store that it writes."""
    run, links = tiny_run.trained(), tmp_path / "links"
    links.mkdir()
    for folder in tiny_run.images().iterdir():
        (links / folder.name).symlink_to(folder)
    code, _, error = command("embed", run, links, "--out", tmp_path / "v.npy")
    assert code == 3 and "--follow-links" in error and "pack" in error
    pack(links, tmp_path / "store", follow_links=True)
    assert command("embed", run, tmp_path / "store", "--out", tmp_path / "v.npy")[0] == 0
    assert len(np.load(tmp_path / "v.npy")) == tiny_run.IMAGES


def test_duplicates_of_a_file_and_of_a_run(command, tmp_path):
    """A planted copy and its resized twin are one group; the run's own images need no file."""
    run, folder = tiny_run.copy(tmp_path), tmp_path / "pictures"
    shutil.copytree(tiny_run.images(), folder)
    image = sorted(folder.rglob("*.png"))[5]
    shutil.copy(image, folder / "copy.png")
    command("embed", run, folder, "--out", tmp_path / "v.npy")
    code, text, _ = command("duplicates", tmp_path / "v.npy", "--above", 0.999999, "--json")
    tree = json.loads(text)
    planted = [g for g in tree["groups"] if "copy.png" in g["names"]]
    assert code == 0 and len(planted) == 1 and f"{image.parent.name}/{image.name}" in planted[0]["names"]
    assert tree["repeated"] == sum(len(g["names"]) - 1 for g in tree["groups"])
    code, text, _ = command("duplicates", run, "--above", 1)
    assert code == 0 and "groups at a cosine of 1 or more" in text
    code, _, said = command("duplicates", run, "--above", 2)
    assert code == 2 and "between -1 and 1" in said


def test_export_prints_file_and_card(command, tmp_path):
    out = tmp_path / "e.safetensors"
    code, text, _ = command("export", tiny_run.trained(), "--out", out, "--json")
    tree = json.loads(text)
    assert code == 0 and tree["card"] == f"{out}.json" and tree["max_difference"] is None


def test_errors_are_one_line_with_the_right_code(command, tmp_path):
    vectors = np.ones((4, 32), dtype=np.float32)
    vectors[2, 1] = np.nan
    np.save(tmp_path / "nan.npy", vectors)
    run, image = tiny_run.trained(), next(tiny_run.images().rglob("*.png"))
    newer = tiny_run.copy(tmp_path)
    facts = json.loads((newer / "run.json").read_text())
    (newer / "run.json").write_text(json.dumps({**facts, "version": 99}))
    cases = [
        (("lens", tmp_path), 2, "not a run folder"),
        (("lens", tmp_path / "nan.npy"), 3, "row 2"),
        (("lens", tmp_path / "no.npy"), 3, "no embeddings file"),
        (("lens", run, "--images", 1), 2, "at least 3 images"),
        (("lens", run, "--labels", tmp_path / "x.csv"), 2, "--labels is for"),
        (("neighbors", run, image, "--embeddings", tmp_path / "nan.npy"), 3, "row 2"),
        (("embed", run, tmp_path / "none", "--out", tmp_path / "v.npy"), 3, "no folder"),
        (("embed", run, tiny_run.images(), "--out", tmp_path / "v.csv"), 2, ".npy or .parquet"),
        (("embed", newer, tiny_run.images(), "--out", tmp_path / "v.npy"), 4, "newer kontrast"),
        (("export", newer), 4, "newer kontrast"),
        (("export", run, "--format", "pickle"), 2, "allowed: safetensors, onnx"),
        (("embed", run, tiny_run.images()), 2, "--out"),
    ]
    for words, wanted, part in cases:
        code, out, err = command(*words)
        assert (code, out) == (wanted, ""), (words, code, err)
        assert part in err and len(err.strip().splitlines()) == 1, (words, err)


def test_embed_imports_nothing_slow(tmp_path):
    """torchvision and an optimizer would each add seconds to every call."""
    code = (
        "import sys, typer\nfrom kontrast.cli import main, runs\n"
        "main.app = typer.Typer()\nruns.register(main.app)\n"
        "assert 'torch' not in sys.modules\ncode = main.run(sys.argv[1:])\n"
        "print(code, *[m for m in ('torchvision', 'torch._dynamo', 'sympy', 'sklearn', 'pyarrow') if m in sys.modules])"
    )
    words = ["embed", tiny_run.trained(), tiny_run.images(), "--out", tmp_path / "v.npy", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, env=environment
    )
    assert done.stdout.splitlines()[-1] == "0", done.stdout + done.stderr
