"""The examples in the docstrings of the probes."""

from __future__ import annotations

import pytest

from kontrast import probes

from support.doctests import run_examples


@pytest.mark.parametrize("name", sorted(set(probes.__all__) - {"FINE_TUNING", "PROTOCOLS"}))
def test_examples(name):
    run_examples(getattr(probes, name))
