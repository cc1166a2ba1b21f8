"""The examples in the docstrings of the views."""

from __future__ import annotations

import pytest

from kontrast import views

from support.doctests import run_examples


@pytest.mark.parametrize("name", sorted(set(views.__all__) - {"POLICIES"}))
def test_examples(name):
    run_examples(getattr(views, name))
