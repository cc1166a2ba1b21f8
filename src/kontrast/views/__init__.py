"""Batches of images to batches of augmented views, on the device, seeded."""

from kontrast.views.draws import Draws, draw, keys
from kontrast.views.policies import POLICIES, Policy
from kontrast.views.views import Views

__all__ = ["POLICIES", "Draws", "Policy", "Views", "draw", "keys"]
