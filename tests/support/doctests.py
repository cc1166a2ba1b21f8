"""Run the examples in docstrings."""

from __future__ import annotations

import doctest
import inspect
from types import ModuleType


def run_examples(thing: object) -> None:
    """Run the examples in the docstring of a function, class or module; fail if there is none or one is wrong."""
    module = thing if isinstance(thing, ModuleType) else inspect.getmodule(thing)
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, getattr(thing, "__name__", "?"), module=module)
    assert test.examples, f"{test.name} has no example in its docstring"
    report: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, _ = doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert not failed, "".join(report)
