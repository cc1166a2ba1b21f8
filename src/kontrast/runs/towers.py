"""Both towers of a run with text: images and texts to unit vectors of one space. D width of the projections."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kontrast.data import ImageSet
from kontrast.errors import CheckpointError, UsageError
from kontrast.probes import extract_features
from kontrast.runs.run import Run, open_run
from kontrast.training.caption_batches import tokenizer_of
from kontrast.training.checkpoints import read_weights
from kontrast.training.device import choose_device
from kontrast.training.run_folder import sha256
from kontrast.training.student import Student

BATCH = 512
WEIGHTS = "text.safetensors"


class Towers:
    """The towers of a run, which map images and texts to unit vectors that can be compared.

    Args:
        run: A run folder or a `kontrast.Run`, trained with a [text] tower.
        device: "auto" (default), "cpu" or "cuda".
        trained: False gives the towers as they were before the first step.
    """

    def __init__(self, run: str | os.PathLike[str], device: str | torch.device = "auto", trained: bool = True):
        self.run, self.device = open_run(run), choose_device(str(device))
        if self.run.recipe.text is None:
            raise UsageError(f"{self.run.path} was trained without texts: train with a recipe that has [text]")
        self.tokenizer = tokenizer_of(self.run.recipe.text, self.run.folder)
        student = self.run.untrained()
        if trained:
            student.encoder.load_state_dict(self.run.encoder().state_dict())
            load_text_tower(self.run, student)
        self.student = student.to(self.device).eval()
        assert student.text is not None
        self.text_tower = student.text

    def images(self, images: ImageSet, advance: Callable[[int], None] | None = None) -> Tensor:
        """Return unit vectors [N,D] of images, cropped and resized as for the probes."""
        transform = self.run.transform()
        found = extract_features(self.student, images, transform, device=self.device, advance=advance)
        return normalize(found, dim=-1)

    def project(self, features: Tensor) -> Tensor:
        """Return unit vectors [N,D] of features [N,F] of the image encoder."""
        with torch.inference_mode():
            found = [self.student.head(part.to(self.device)).float().cpu() for part in features.split(8192)]
        return normalize(torch.cat(found).clone(), dim=-1)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Return unit vectors [N,D] of texts."""
        tokens, found = self.tokenizer(texts), []
        with torch.inference_mode():
            for part in tokens.split(BATCH):
                found.append(self.text_tower(part.to(self.device)).float().cpu())
        return normalize(torch.cat(found).clone(), dim=-1)


def load_text_tower(run: Run, student: Student) -> None:
    """Load text.safetensors, after checking that it is what the run wrote."""
    path = run.path / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the run has not finished; resume it first")
    weights = read_weights(path)
    expected = {k: (t.shape, t.dtype) for k, t in student.state_dict().items() if not k.startswith("encoder.")}
    if {k: (t.shape, t.dtype) for k, t in weights.items()} != expected:
        problem = "does not fit the run's recipe: it has other tensors"
    elif not all(torch.isfinite(t).all() for t in weights.values()):
        problem = "holds NaN or infinity: its training went wrong"
    elif run.info.get("text_sha256") not in (None, sha256(path.read_bytes())):
        problem = "is damaged or was changed: restore it, or remove text_sha256 from run.json to use it as it is"
    else:
        student.load_state_dict(weights, strict=False)
        return
    raise CheckpointError(f"{path} {problem}")
