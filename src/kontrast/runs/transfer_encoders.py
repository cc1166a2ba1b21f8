"""The encoders that a transfer compares: the run's own, the same with random weights, and those of other runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kontrast.networks import Encoder
from kontrast.runs.run import Run, open_run
from kontrast.training.learner import build_student

TRAINED, RANDOM = "trained", "random"


@dataclass(frozen=True)
class TransferEncoder:
    """An encoder to be transferred.

    Args:
        name: "trained", "random" or the path of another run.
        run: the run that it belongs to, which says how images are normalized.
        digest: the SHA-256 of its weights; "random" for those that depend on the seed.
        build: returns it for a seed, on the CPU.
    """

    name: str
    run: Run
    digest: str
    build: Callable[[int], Encoder]

    def normalization(self) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation of each color channel, as the encoder expects them."""
        policy = self.run.transform().policies[0]
        mean, std = (list(v) * 3 if len(v) == 1 else list(v) for v in (policy.mean, policy.std))
        return mean, std


def transfer_encoders(
    run: str | os.PathLike[str], against: Sequence[str | os.PathLike[str]] = (), control: bool = True
) -> list[TransferEncoder]:
    """Return the encoders of a comparison.

    Args:
        run: the run whose encoder is transferred.
        against: other runs, for example one that was trained with labels.
        control: add the run's encoder with random weights, others for each seed.
    """
    own = open_run(run)
    found = [TransferEncoder(TRAINED, own, own.encoder_digest(), partial(_trained, own))]
    for path in against:
        other = open_run(path)
        found.append(TransferEncoder(os.fspath(path), other, other.encoder_digest(), partial(_trained, other)))
    if control:
        found.append(TransferEncoder(RANDOM, own, RANDOM, partial(random_encoder, own)))
    return found


def _trained(run: Run, seed: int) -> Encoder:
    return run.encoder()


def random_encoder(run: Run, seed: int) -> Encoder:
    """Return a run's encoder with random weights, which are those before its first step if the seed is the run's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_student(run.recipe, run.channels).encoder.eval()
