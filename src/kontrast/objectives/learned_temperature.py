"""A temperature that is learned with the network: `temperature="learned"`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.kernels.dense import in_torch_func
from kontrast.objectives.arguments import Number, fixed, positive, refuse

BOUNDS = (0.01, 1.0)
"""The least and the largest temperature, unless others are given; CLIP's scale is at most 100 too."""


class LearnedTemperature(nn.Module):
    """A temperature that is a parameter of the loss: tau = exp(-log_scale), as in CLIP.

    Before each use the parameter is moved into its bounds in place, so that its gradient never vanishes at a bound and
    it doesn't wander off beyond it. Its optimizer should not decay it; kontrast's don't decay single numbers.

    Args:
        initial: the temperature at the start, within the bounds.
        bounds: the least and the largest temperature.

    Shape:
        the temperature and log_scale are tensors of shape [].

    Example:
        >>> LearnedTemperature(initial=0.5)()
        tensor(0.5000, grad_fn=<ExpBackward0>)
    """

    def __init__(self, initial: float = 0.2, bounds: Sequence[float] = BOUNDS):
        super().__init__()
        self.bounds = least, largest = tuple(bounds)
        self.initial = initial
        self.limits = -math.log(largest), -math.log(least)  # of log_scale
        self.log_scale = nn.Parameter(torch.tensor(-math.log(initial)))

    def forward(self) -> Tensor:
        """Return the temperature, with gradient to log_scale."""
        log_scale: Tensor = self.log_scale
        if in_torch_func():  # where no parameter may be changed: the same value and gradient without a change
            log_scale = log_scale + (log_scale.clamp(*self.limits) - log_scale).detach()
        else:
            with torch.no_grad():
                log_scale.clamp_(*self.limits)
        return torch.exp(-log_scale)

    def __float__(self) -> float:
        """Return the temperature that the next use will have."""
        return math.exp(-self.log_scale.detach().clamp(*self.limits).item())

    def extra_repr(self) -> str:
        return f"initial={self.initial}, bounds={self.bounds}"


Temperature = Number | LearnedTemperature


def temperature_argument(value: Any, initial: Any, bounds: Any, *, default: float) -> Temperature:
    """Check a temperature that may be "learned", with its initial value and bounds.

    Args:
        value: a number or "learned".
        initial: the initial value, or None: the default.
        bounds: the least and the largest value, or None: `BOUNDS`.
        default: the objective's own temperature.
    """
    learned = isinstance(value, str) and value == "learned"
    for name, given in (("initial_temperature", initial), ("temperature_bounds", bounds)):
        if given is not None and not learned:
            refuse(name, given, "only temperature='learned' has it; leave it out")
    if not learned:
        return positive("temperature", value)
    limits = temperature_range("temperature_bounds", BOUNDS if bounds is None else bounds)
    initial = default if initial is None else initial
    start = fixed("initial_temperature", positive("initial_temperature", initial))
    if not limits[0] <= start <= limits[1]:
        refuse("initial_temperature", initial, f"give a number within temperature_bounds, {list(limits)}")
    return LearnedTemperature(start, limits)


def temperature_range(name: str, bounds: Any) -> tuple[float, float]:
    """Check the least and the largest temperature."""
    numbers = bounds if isinstance(bounds, Sequence) and not isinstance(bounds, str | bytes) else []
    limits = [fixed(name, positive(name, bound)) for bound in numbers]
    if len(limits) != 2 or limits[0] >= limits[1]:
        refuse(name, bounds, "give the least and the largest temperature, for example [0.01, 1.0]")
    return limits[0], limits[1]


def current(temperature: Temperature) -> Number:
    """Return the value of a temperature, learned or not."""
    return temperature() if isinstance(temperature, LearnedTemperature) else temperature
