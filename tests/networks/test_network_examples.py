"""The examples in the docstrings of the networks."""

from __future__ import annotations

import pytest

from kontrast import networks

from support.doctests import run_examples

TYPES = {"ENCODERS", "HEADS", "PREDICTORS", "Encoder", "Head"}


@pytest.mark.parametrize("name", sorted(set(networks.__all__) - TYPES))
def test_examples(name):
    run_examples(getattr(networks, name))
