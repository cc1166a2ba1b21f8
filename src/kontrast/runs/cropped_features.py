"""Features of fresh random crops for every epoch of a linear protocol.

N train images, F width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.data import ImageSet
from kontrast.probes import PROTOCOLS
from kontrast.runs.run import Run
from kontrast.training.build import build_views, precision
from kontrast.views import Views, keys

CROPS = {name: None if name == "cacr" else (0.08, 1.0) for name in PROTOCOLS}
"""Range of the crops' share of the area, per protocol; None: that of the run's own views."""
FINE_TUNING_CROP = (0.08, 1.0)
FIRST_EPOCH = 1 << 41  # random draws that neither training nor the lens uses
CHUNK = 2048


def crop_views(run: Run, crop: tuple[float, float] | None, dtype: torch.dtype) -> Views:
    """Random crops of the run's images, flipped if the run's own views are.

    Args:
        run: The run.
        crop: Range of the crops' share of the area; None: that of the run's own views.
        dtype: The type of the views.
    """
    training = build_views(run.recipe, torch.float32).policies[0]
    policy = dataclasses.replace(
        run.transform().policies[0], crop_scale=crop or training.crop_scale, flip=training.flip
    )
    return Views(policy, count=1, size=run.recipe.views.size, dtype=dtype)


class FineTuningCrops:
    """Makes random crops of a batch for an epoch of fine-tuning.

    Args:
        run: The run that the encoder belongs to.
        seed: Decides about the crops, with the epoch and the number of each image.

    Attributes:
        colors: The mean and the deviation [3] that normalized the crops, if they are red, green and blue.
    """

    def __init__(self, run: Run, seed: int):
        self.views, self.seed = crop_views(run, FINE_TUNING_CROP, torch.float32), seed
        policy = self.views.policies[0]
        shown = run.channels == 3 and policy.picture_channels(3) == 3 and run.limits.form is None
        self.colors = tuple(torch.tensor(one).expand(3) for one in (policy.mean, policy.std)) if shown else None

    def __call__(self, epoch: int, rows: Tensor, images: Tensor, sizes: Tensor | None) -> Tensor:
        drawn: Any = self.views(images, keys(self.seed, FIRST_EPOCH + epoch, rows), sizes)
        return drawn[0]


class CroppedFeatures:
    """The `features_of_epoch` of a linear protocol: `features(epoch)` crops all train images and encodes them [N,F].

    Crops are flipped if the run's own views are. Images and features stay on the device.

    Args:
        run: The run that the encoder belongs to.
        encoder: The frozen encoder, on `device`.
        train: The train images.
        crop: Range of the crops' share of the area; None: that of the run's own views.
        device: Where to crop and encode.
        advance: Called with the number of images after each epoch.
    """

    def __init__(
        self,
        run: Run,
        encoder: nn.Module,
        train: ImageSet,
        crop: tuple[float, float] | None,
        device: torch.device,
        advance: Callable[[int], None] = lambda _: None,
    ):
        self.encoder, self.device, self.seed, self.index = encoder, device, run.recipe.seed, train.numbers()
        self.advance = advance
        self.dtype = precision(run.recipe.training.precision, device)
        self.views = crop_views(run, crop, self.dtype)
        self.chunks = []
        for positions in torch.arange(len(train)).split(CHUNK):
            pixels, sizes = train.batch(positions)
            self.chunks.append((positions, pixels.to(device), None if sizes is None else sizes.to(device)))

    @torch.inference_mode()
    def __call__(self, epoch: int) -> Tensor:
        features = []
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            for positions, pixels, sizes in self.chunks:
                drawn = keys(self.seed, FIRST_EPOCH + epoch, self.index[positions]).to(self.device)
                features.append(self.encoder(self.views(pixels, drawn, sizes)[0]).float())
        self.advance(len(self.index))
        return torch.cat(features)
