"""The map of rooms: who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kontrast

ROOT = Path(kontrast.__file__).parent

BASE = {"registry", "errors", "files", "counters", "sharding"}
MAY_IMPORT = {
    "errors": set(),
    "counters": set(),
    "sharding": {"errors"},
    "files": {"errors"},
    "registry": {"errors"},
    "distributed": {"errors"},
    "plugins": {"registry", "errors"},
    "config": {"registry", "errors", "files"},
    "recipes": set(),
    "kernels": {"counters"},
    "objectives": {"kernels", "distributed", "registry", "errors"},
    "views": BASE,
    "data": BASE,
    "networks": BASE,
    "optim": BASE,
    "reports": set(),
}
MAY_IMPORT["probes"] = {"networks", "optim", "objectives", "kernels", *BASE}
MAY_IMPORT["lens"] = {"networks", "optim", "objectives", "kernels", *BASE}
MAY_IMPORT["training"] = set(MAY_IMPORT) - {"reports"}
MAY_IMPORT["runs"] = {*MAY_IMPORT["training"], "training"}
MAY_IMPORT["studies"] = {*MAY_IMPORT["runs"], "runs"}
MAY_IMPORT["papers"] = {*MAY_IMPORT["studies"], "studies"}
MAY_IMPORT["cli"] = {*MAY_IMPORT["papers"], "papers", "reports"}

# Heavy things stand inside the functions that use them, so that a command pays only for what it needs.
NEVER_AT_THE_TOP = {"torchvision", "sklearn", "matplotlib", "timm", "pyarrow", "onnx", "tensorboard", "rich", "triton"}


def imports(path: Path, top_only: bool = False) -> set[str]:
    """Dotted names that a file imports; relative imports are not used in this project."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / f"{room}.py"]


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_the_map_allows(room):
    for path in files(room):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("kontrast.")} - {"__version__"}
        forbidden = ours - MAY_IMPORT[room] - {room}
        assert not forbidden, f"{path.relative_to(ROOT)} imports {sorted(forbidden)}"


def test_every_room_is_on_the_map():
    rooms = {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms <= set(MAY_IMPORT), f"not on the map: {sorted(rooms - set(MAY_IMPORT))}"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_imports_stand_where_they_are_used(path):
    heavy = {name.split(".")[0] for name in imports(path, top_only=True)} & NEVER_AT_THE_TOP
    if path.name.startswith("triton"):
        heavy -= {"triton"}
    assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)} at the top"


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return {name.split(".")[0] for name in out.split()}


def test_the_command_line_does_not_import_torch():
    assert "torch" not in loaded_after("import kontrast.cli.main, kontrast.config.recipe_files")


def test_training_does_not_import_the_compiler(tmp_path):
    """It takes seconds, which a stop would wait for too."""
    code = (
        "import sys, kontrast\n"
        f"kontrast.pretrain(out={str(tmp_path / 'run')!r}, device='cpu', training={{'max_steps': 2}})\n"
        "print([m for m in sys.modules if m.startswith(('torch._inductor', 'torch._dynamo', 'sympy'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stdout + done.stderr[-2000:]


def test_objectives_need_torch_alone():
    loaded = loaded_after("import kontrast.objectives")
    assert not loaded & {"torchvision", "sklearn", "PIL", "typer", "rich", "safetensors", "timm"}
