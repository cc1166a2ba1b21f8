"""The shape of the source tree: which room may import which, and how long files and functions may be."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import kontrast

ROOT = Path(kontrast.__file__).parent
TESTS = Path(__file__).parent

BASE = {
    "registry", "errors", "files", "counters", "sharding", "import_path", "operating_system", "float64", "addresses",
}  # fmt: skip
MAY_IMPORT = {
    "errors": set(),
    "addresses": {"errors"},
    "counters": set(),
    "import_path": set(),
    "sharding": {"errors"},
    "operating_system": set(),
    "float64": set(),
    "notebook": set(),
    "files": {"errors", "operating_system"},
    "registry": {"errors"},
    "distributed": {"errors"},
    "plugins": {"registry", "errors"},
    "config": {"registry", "errors", "files", "addresses"},
    "recipes": set(),
    "kernels": {"counters", "float64"},
    "objectives": {"kernels", "distributed", "registry", "errors", "float64"},
    "views": BASE,
    "data": BASE,
    "networks": BASE,
    "optim": BASE,
    "reports": {"notebook"},
}
MAY_IMPORT["probes"] = {"notebook", "networks", "optim", "objectives", "kernels", *BASE}
MAY_IMPORT["lens"] = {"networks", "optim", "objectives", "kernels", *BASE}
MAY_IMPORT["detection"] = {"config", "data", "networks", "optim", "probes", *BASE}
MAY_IMPORT["training"] = set(MAY_IMPORT) - {"reports", "detection"}
MAY_IMPORT["engines"] = {"notebook", "distributed", "plugins", "registry", "errors", "files", "training"}
MAY_IMPORT["runs"] = {*MAY_IMPORT["training"], "training", "detection", "engines"}
MAY_IMPORT["studies"] = {*MAY_IMPORT["runs"], "runs"}
MAY_IMPORT["papers"] = {*MAY_IMPORT["studies"], "studies"}
MAY_IMPORT["cli"] = {*MAY_IMPORT["papers"], "papers", "reports"}

EXCEPTIONS = {("lens/__init__.py", "runs")}
"""The package `lens` is also the verb `kontrast.lens(run)`, whose implementation it imports when it is called."""

NEVER_AT_THE_TOP = {
    "torchvision", "sklearn", "matplotlib", "timm", "pyarrow", "onnx", "tensorboard", "rich", "triton", "tokenizers",
    "transformers", "faster_coco_eval", "faiss", "ray", "huggingface_hub",
}  # fmt: skip
"""Heavy packages are imported inside the functions that use them, so that a command waits only for what it needs."""

LONGEST_FILE, LONGEST_FUNCTION = 450, 70


@pytest.fixture(scope="module")
def counts():
    """The functions of benchmarks/source_counts.py."""
    spec = importlib.util.spec_from_file_location("source_counts", TESTS.parent / "benchmarks" / "source_counts.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def imports(path: Path, top_only: bool = False) -> set[str]:
    """Return the dotted names that a file imports."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / f"{room}.py"]


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_the_table_allows(room):
    for path in files(room):
        name = path.relative_to(ROOT).as_posix()
        rooms = {module.split(".")[1] for module in imports(path) if module.startswith("kontrast.")} - {"__version__"}
        forbidden = {other for other in rooms - MAY_IMPORT[room] - {room} if (name, other) not in EXCEPTIONS}
        assert not forbidden, f"{name} imports {sorted(forbidden)}"


def test_every_room_is_in_the_table():
    rooms = {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms <= set(MAY_IMPORT), f"not in the table: {sorted(rooms - set(MAY_IMPORT))}"


def test_no_modules_import_each_other(counts):
    """Imports inside functions don't count here; benchmarks/source_counts.py counts their cycles too."""
    trees = {counts.module_name(path, ROOT): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    assert not counts.import_cycles(trees)


def test_no_two_modules_share_a_name():
    names = Counter(path.stem for path in ROOT.rglob("*.py") if not path.stem.startswith("__"))
    assert not (twice := sorted(name for name, count in names.items() if count > 1)), twice


def test_no_two_classes_share_a_name():
    trees = [ast.parse(path.read_text()) for path in ROOT.rglob("*.py")]
    counts = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in counts.items() if count > 1] == []


def test_files_and_functions_are_not_too_long(counts):
    long = []
    for path in sorted(ROOT.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        long += [name] * (len(text.splitlines()) > LONGEST_FILE)
        lengths = counts.function_lengths(ast.parse(text))
        long += [f"{name}: {function} has {length} lines" for function, length in lengths if length > LONGEST_FUNCTION]
    assert not long


def test_no_test_imports_another_test():
    for path in TESTS.rglob("*.py"):
        other = {name for name in imports(path) if name.split(".")[0].startswith("test")}
        assert not other, f"{path.relative_to(TESTS)} imports {sorted(other)}; shared code belongs to tests/support"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_packages_are_imported_inside_functions(path):
    heavy = {name.split(".")[0] for name in imports(path, top_only=True)} & NEVER_AT_THE_TOP
    if path.name.startswith("triton"):
        heavy -= {"triton"}
    assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)} at the top"


def loaded_after(statement: str) -> set[str]:
    """Return the top-level packages that a statement loads in a new process."""
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return {name.split(".")[0] for name in out.split()}


def test_the_command_line_does_not_import_torch():
    assert "torch" not in loaded_after("import kontrast.cli.main, kontrast.config.recipe_files")


def test_training_does_not_import_the_compiler(tmp_path):
    """The compiler takes seconds to import, which would also delay the answer to a signal."""
    small = "encoder={'width': 16}, views={'size': 16}, training={'max_steps': 2, 'batch': 16}"
    code = (
        "import sys, kontrast\n"
        f"kontrast.pretrain(out={str(tmp_path / 'run')!r}, device='cpu', evaluation={{'every': 0}}, {small})\n"
        "print([m for m in sys.modules if m.startswith(('torch._inductor', 'torch._dynamo', 'sympy'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stdout + done.stderr[-2000:]


def test_objectives_need_only_torch():
    loaded = loaded_after("import kontrast.objectives")
    assert not loaded & {"torchvision", "sklearn", "PIL", "typer", "rich", "safetensors", "timm"}


def test_no_test_limits_the_seconds_that_a_process_may_take():
    """On a busy machine everything takes longer: such limits fail, and say nothing about the program."""
    waiting = {"run", "call", "check_call", "check_output", "communicate", "wait", "join", "get", "result"}
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in waiting:
                limits = [k.value for k in node.keywords if k.arg == "timeout" and isinstance(k.value, ast.Constant)]
                assert all(limit.value >= 3600 for limit in limits), f"{path.relative_to(TESTS)}, line {node.lineno}"
