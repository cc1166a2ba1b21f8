"""Plugins: `kontrast --import FILE.py` and KONTRAST_IMPORT make names of the user's own known to every command."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from kontrast import plugins
from kontrast.cli.explain import explain
from kontrast.errors import UsageError
from kontrast.networks import ENCODERS, HEADS, encoder, head
from kontrast.objectives import OBJECTIVES
from kontrast.views import POLICIES, Policy, Views

from support.command_line import TINY, kontrast, one_line, real

CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"
NETWORK = """
import torch
from kontrast.networks import ENCODERS
print("a word of its own")

@ENCODERS.register("my-net")
class MyNet(torch.nn.Module):
    def __init__(self, channels: int = 3, size: int = 32, width: int = 16):
        super().__init__()
        self.width, self.layer = width, torch.nn.Linear(channels * size * size, width)

    def forward(self, images):
        return self.layer(images.flatten(1))
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Return a folder for files of the user; names, modules and the variable are restored after the test."""
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    entries = {}
    for registry in (OBJECTIVES, ENCODERS, HEADS, POLICIES):
        entries[registry.kind] = registry, dict(registry)
    before = set(sys.modules)
    yield tmp_path
    for registry, known in entries.values():
        registry.clear()
        registry.update(known)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def snippet() -> str:
    """Return the objective in CONTRIBUTING.md."""
    code = re.search(r"   ```python\n(.*?)   ```", CONTRIBUTING.read_text(encoding="utf-8"), re.DOTALL)[1]
    return "\n".join(line.removeprefix("   ") for line in code.splitlines())


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_registered_names_can_be_trained_and_used_again(place, monkeypatch):
    """The objective of CONTRIBUTING.md and a network: pretrain, embed, explain with --import; without it, one line."""
    loss, network = written(place / "my_loss_1.py", snippet()), written(place / "my-net.py", NETWORK)
    own = ["--import", loss, "--import", network]
    run = str(place / "run")
    asked = [*TINY, "encoder.name=my-net", "encoder.width=8", "objective.name=my-loss"]
    done = kontrast(*own, "pretrain", *asked, "--out", run, "--no-probes", "--json")
    assert done.returncode == 0, done.stderr
    assert (
        json.loads(done.stdout)["run"] == run and "a word of its own" in done.stderr
    )  # standard output is the result's
    assert json.loads((place / "run" / "run.json").read_text())["resume"].startswith(f"kontrast --import {loss} ")
    assert os.environ[plugins.VARIABLE] == os.pathsep.join([loss, network])
    assert kontrast(*own, "explain", "my-loss").returncode == 0  # named again, it is not imported again
    embedded = kontrast("embed", run, "digits", "--split", "test", "--out", str(place / "vectors.npy"))
    assert embedded.returncode == 0, embedded.stderr
    del ENCODERS["my-net"]
    monkeypatch.setenv(plugins.VARIABLE, "")
    one_line(kontrast("probe", run, "knn"), 2, "unknown encoder 'my-net'", "--import FILE.py")


def test_a_process_that_a_command_starts_knows_the_names(place):
    """Another process reads the variable, which the option sets; a file may import one beside it with a dot."""
    written(place / "neighbor_1.py", "from kontrast.objectives import positive\n")
    network = written(place / "second.py", "from . import neighbor_1\nneighbor_1.positive('x', 1)\n" + NETWORK)
    plugins.import_files([network])
    done = real("explain", "my-net")
    assert done.returncode == 0 and done.stdout.startswith("encoder my-net"), done.stderr


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("missing_1.py", None, "no such file"),
        ("notes.txt", "x", "not a .py file"),
        ("broken_1.py", "1 / 0", "ZeroDivisionError: division by zero"),
        ("broken_2.py", "def", "SyntaxError"),
        ("broken_3.py", "import no_such_library", "No module named 'no_such_library'"),
        ("broken_4.py", "import broken_3", "write `from . import broken_3`"),
        ("leaving_1.py", "raise SystemExit(3)", "SystemExit: 3"),
        ("twice_1.py", "from kontrast.objectives import *\nOBJECTIVES.register('dcl')(DCL)", "registered twice"),
        ("json.py", "", "name of another module"),
        ("wave.py", "", "name of another module"),
        (f"two{os.pathsep}parts.py", "", "move the file"),
    ],
)
def test_a_file_that_cannot_be_imported_gives_one_line(place, name, text, words):
    """The command exits with 2 and one line that names the file; a traceback appears only with --debug."""
    path = place / name
    (place / "broken_3.py").write_text("")
    if text is not None:
        path.write_text(text)
    one_line(kontrast("--import", str(path), "recipes"), 2, f"--import {path}", words)
    assert os.environ[plugins.VARIABLE] == ""
    shown = kontrast("--debug", "--import", str(path), "recipes")
    assert shown.returncode == 2 and "Traceback" in shown.stderr


def test_the_variable_alone_is_read_by_the_command(place, monkeypatch):
    monkeypatch.setenv(plugins.VARIABLE, os.pathsep.join(["", str(place / "gone.py"), ""]))
    one_line(kontrast("recipes"), 2, "gone.py", "no such file")
    assert kontrast("--help").returncode == 0 and kontrast("--version").returncode == 0


def test_networks_that_lack_required_arguments_or_a_width_are_refused(place):
    """An argument that kontrast passes is not called unknown, and a missing width is noticed early."""

    class Plain(torch.nn.Linear):
        def __init__(self, channels: int = 3, size: int = 32, inputs: int = 4):
            super().__init__(inputs, 4)

    for registry in (ENCODERS, HEADS):
        registry.register("plain")(Plain)
        registry.register("narrow")(lambda width=8: torch.nn.Linear(3, width))
    for build in (lambda name: encoder(name), lambda name: head(name, 4)):
        with pytest.raises(UsageError, match="'plain' has no width: set"):
            build("plain")
    with pytest.raises(UsageError, match="'narrow' must accept 'channels' and 'size'"):
        encoder("narrow")
    with pytest.raises(UsageError, match="'narrow' must accept 'inputs'"):
        head("narrow", 4)
    tree = explain("plain").to_dict()
    assert tree["text"] == ""  # torch's words about its linear layer are not the network's own


def test_a_policy_is_registered_as_a_function_that_returns_one_or_several(place):
    POLICIES.register("my-policy")(lambda: Policy(flip=1.0))
    assert [p.flip for p in Views("my-policy", count=2).policies] == [1.0, 1.0]
    assert explain("my-policy").to_dict()["views"][0]["flip"] == 1.0
    with pytest.raises(UsageError, match="register a class, or a function that makes it"):
        POLICIES.register("no-function")(Policy())


def test_the_start_of_a_command_names_the_imported_files(monkeypatch):
    monkeypatch.setenv(plugins.VARIABLE, "")
    assert plugins.command_start() == ["kontrast"]
    monkeypatch.setenv(plugins.VARIABLE, os.pathsep.join(["/a.py", "/b.py", "/a.py"]))
    assert plugins.command_start() == ["kontrast", "--import", "/a.py", "--import", "/b.py"]
