"""Count lines, files, long functions, raise statements and import cycles of a source tree.

    python benchmarks/source_counts.py                              # of src/kontrast
    python benchmarks/source_counts.py TREE --against OTHER_TREE    # two trees side by side

Code lines are neither blank nor comments nor docstrings. An import cycle is a group of modules that import each other;
imports under `if TYPE_CHECKING` don't count, nor does the package's own __init__, whose functions load the others.
Triton kernels don't count as functions.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Counts:
    """What is counted in one tree; `rooms` has the number of files per package."""

    lines: int = 0
    code_lines: int = 0
    doc_lines: int = 0
    raises: int = 0
    rooms: Counter[str] = field(default_factory=Counter)
    longest_function: tuple[int, str] = (0, "")
    longest_file: tuple[int, str] = (0, "")
    cycles: list[list[str]] = field(default_factory=list)
    hidden_cycles: list[list[str]] = field(default_factory=list)

    def rows(self) -> dict[str, str]:
        """Return the numbers with their labels, for printing."""
        return {
            "files": f"{self.rooms.total():,}",
            "lines": f"{self.lines:,}",
            "code lines": f"{self.code_lines:,}",
            "docstring lines": f"{self.doc_lines:,}",
            "raise statements": f"{self.raises:,}",
            "raise per 1,000 code lines": f"{1000 * self.raises / max(1, self.code_lines):.1f}",
            "longest function (lines)": "{} ({})".format(*self.longest_function),
            "longest file (lines)": "{} ({})".format(*self.longest_file),
            "import cycles, top level": f"{len(self.cycles)}",
            "import cycles, any import": f"{len(self.hidden_cycles)}",
            **{f"files in {room}": f"{count}" for room, count in sorted(self.rooms.items())},
        }


def count_tree(root: Path) -> Counts:
    """Count every Python file of a tree, whose folder has the package's name."""
    counts = Counts()
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}
    for path, tree in trees.items():
        text = path.read_text(encoding="utf-8")
        relative = path.relative_to(root)
        docs = docstring_lines(tree)
        counts.rooms[relative.parts[0] if len(relative.parts) > 1 else "(top level)"] += 1
        counts.lines += len(text.splitlines())
        counts.doc_lines += len(docs)
        counts.code_lines += len(code_lines(text) - docs)
        counts.raises += sum(isinstance(node, ast.Raise) for node in ast.walk(tree))
        for name, length in function_lengths(tree):
            counts.longest_function = max(counts.longest_function, (length, f"{relative}: {name}"))
        counts.longest_file = max(counts.longest_file, (len(text.splitlines()), str(relative)))
    modules = {module_name(path, root): tree for path, tree in trees.items() if path != root / "__init__.py"}
    counts.cycles = import_cycles(modules)
    counts.hidden_cycles = import_cycles(modules, inside_functions=True)
    return counts


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines that are neither blank nor comments; docstrings are among them."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {n for t in tokens if t.type not in skipped for n in range(t.start[0], t.end[0] + 1)}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all docstrings, including the strings that document a constant above them."""
    strings = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return {n for node in strings for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def function_lengths(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the name and length of every function without its docstring. Triton kernels are not counted."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef) and not any("jit" in ast.unparse(d) for d in node.decorator_list):
                docs = node.body[0] if ast.get_docstring(node) is not None else None
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                yield name, length - ((docs.end_lineno or 0) - docs.lineno + 1 if docs else 0)
            yield from function_lengths(node, f"{name}.")
        else:
            yield from function_lengths(node, prefix)


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a file, such as kontrast.lens.rank."""
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_imports(tree: ast.AST, modules: set[str], inside_functions: bool) -> set[str]:
    """Return the modules of the package that a module imports."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if inside_functions:
            found |= module_imports(node, modules, inside_functions)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import name` imports a submodule if there is one of that name, else the package's own names
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found & modules


def import_cycles(trees: dict[str, ast.Module], inside_functions: bool = False) -> list[list[str]]:
    """Return the groups of modules that import each other at the top level, or anywhere, by Tarjan's algorithm."""
    imports = {name: module_imports(tree, set(trees), inside_functions) - {name} for name, tree in trees.items()}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            cycles.extend([sorted(group)] if len(group) > 1 else [])

    for name in trees:
        if name not in order:
            visit(name)
    return cycles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parents[1] / "src" / "kontrast"
    parser.add_argument("tree", nargs="?", type=Path, default=default, help="the folder of a package")
    parser.add_argument("--against", type=Path, help="another tree, shown in the first column")
    arguments = parser.parse_args()
    columns = [count_tree(tree).rows() for tree in (arguments.against, arguments.tree) if tree is not None]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    width = max(len(column.get(label, "-")) for column in columns[:1] for label in labels)
    for label in labels:
        cells = [column.get(label, "-") for column in columns]
        print(f"{label:<28} {cells[0]:<{width}} {'  '.join(cells[1:])}".rstrip())


if __name__ == "__main__":
    main()
