"""The examples in the docstrings of optimizers and schedules."""

from __future__ import annotations

import pytest

from kontrast.optim import optimizers, schedules

from support.doctests import run_examples


@pytest.mark.parametrize(
    "function",
    [
        optimizers.build_optimizer,
        schedules.scaled_learning_rate,
        schedules.learning_rate,
        schedules.cosine_decay,
        schedules.teacher_momentum,
    ],
)
def test_examples(function):
    run_examples(function)
