"""Fresh crops of every epoch for the linear protocols, which train their classifier on them as the papers do.

N train images, F width of features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kontrast.data import ImageSet
from kontrast.probes import PROTOCOLS
from kontrast.training.building import build_views, precision
from kontrast.training.run import Run
from kontrast.views import Views, keys

CROPS = {name: None if name == "cacr" else (0.08, 1.0) for name in PROTOCOLS}
"""Share of the area in the crops on which each protocol trains its classifier; None: as the run's own views have it."""
PROBE_DRAWS = 1 << 41  # epochs of views that no training and no lens draws
CHUNK = 2048


class CroppedFeatures:
    """`features_of_epoch` for a linear protocol: crops of the epoch through the frozen encoder [N,F], flipped where the
    run's own views are, made and kept on the device. advance: told the number of images of each epoch."""

    def __init__(
        self,
        run: Run,
        encoder: nn.Module,
        train: ImageSet,
        crop: tuple[float, float] | None,
        device: torch.device,
        advance: Callable[[int], None] = lambda _: None,
    ):
        self.encoder, self.device, self.seed, self.index = encoder, device, run.recipe.seed, train.index
        self.advance = advance
        self.kind = precision(run.recipe.training.precision, device)
        own = build_views(run.recipe, torch.float32).policies[0]
        policy = dataclasses.replace(run.transform().policies[0], crop_scale=crop or own.crop_scale, flip=own.flip)
        self.views = Views(policy, count=1, size=run.recipe.views.size, dtype=self.kind)
        self.parts = []
        for positions in torch.arange(len(train)).split(CHUNK):
            pixels, sizes = train.batch(positions)
            self.parts.append((positions, pixels.to(device), None if sizes is None else sizes.to(device)))

    @torch.inference_mode()
    def __call__(self, epoch: int) -> Tensor:
        made = []
        with torch.autocast(self.device.type, self.kind, enabled=self.kind != torch.float32):
            for positions, pixels, sizes in self.parts:
                drawn = keys(self.seed, PROBE_DRAWS + epoch, self.index[positions]).to(self.device)  # type: ignore[index]
                made.append(self.encoder(self.views(pixels, drawn, sizes)[0]).float())
        self.advance(len(self.index))  # type: ignore[arg-type]
        return torch.cat(made)
