"""Every public class and function of the objectives and kernels is documented, and its example runs."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest
import torch

import kontrast.objectives
from kontrast import kernels, objectives
from kontrast.kernels.characteristic import characteristic_sums
from kontrast.objectives import OBJECTIVES, metrics

NAMES = sorted(OBJECTIVES)
DOCUMENTED = {
    **{name: OBJECTIVES[name] for name in NAMES},
    "Objective": objectives.Objective,
    "Sum": objectives.Sum,
    "Terms": objectives.Terms,
    "LearnedTemperature": objectives.LearnedTemperature,
    "objective": objectives.objective,
    "row_statistics": kernels.row_statistics,
    "merge": kernels.merge,
    "mean_vectors": kernels.mean_vectors,
    "nearest_keys": kernels.nearest_keys,
    "sinkhorn_potentials": kernels.sinkhorn_potentials,
    "softplus_sums": kernels.softplus_sums,
    "two_way_statistics": kernels.two_way_statistics,
    "characteristic_sums": characteristic_sums,
    "metrics.alignment": metrics.alignment,
    "metrics.uniformity": metrics.uniformity,
    "metrics.conditional_entropy": metrics.conditional_entropy,
    "metrics.coupling_multiplier": metrics.coupling_multiplier,
}


def section(text: str, title: str) -> str:
    """Return the indented block after a line `title:`, or an empty string."""
    found = re.search(rf"^{title}:\n((?:(?: {{4}}.*)?\n)+)", text + "\n", re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_sections(name) -> None:
    thing = DOCUMENTED[name]
    text = inspect.cleandoc(thing.__doc__)
    assert re.match(r"[A-Z].*\.\n", text), "the first line is one sentence"
    parameters = [p for p in inspect.signature(thing).parameters if p != "name" or thing is objectives.objective]
    described = re.findall(r"^ {4}\**(\w+): \S", section(text, "Args"), re.MULTILINE)
    assert described == parameters
    assert ">>> " in section(text, "Example")


@pytest.mark.parametrize("name", NAMES)
def test_shape_names_the_tensors_that_the_objective_takes(name) -> None:
    family = OBJECTIVES[name]
    shape = section(inspect.cleandoc(family.__doc__), "Shape")
    assert "z [V,B,D]" in shape
    assert ("keys [W,B,D]" in shape) == (not family.needs_labels)
    assert ("bank [M,D]" in shape) == (family.takes_bank and not family.bank_per_view)
    assert ("bank [W,M,D]" in shape) == (family.takes_bank and family.bank_per_view)
    assert ("labels [B]" in shape) == family.takes_labels
    assert ("prototypes [K,D]" in shape) == family.needs_prototypes
    assert ("indices [B]" in shape) == family.needs_indices


@pytest.mark.parametrize("name", DOCUMENTED)
def test_example(name) -> None:
    """Examples of objectives are complete programs; the others may use torch and the names of their module."""
    thing = DOCUMENTED[name]
    names = {} if name in NAMES else {**vars(inspect.getmodule(thing)), "torch": torch}
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, globs=names)
    assert doctest.DocTestRunner().run(test).failed == 0


def test_all_public_names_are_covered() -> None:
    classes = {n for n in kontrast.objectives.__all__ if n[0].isupper() and n not in ("OBJECTIVES", "Pairs")}
    assert classes <= {getattr(thing, "__name__", "") for thing in DOCUMENTED.values()}
