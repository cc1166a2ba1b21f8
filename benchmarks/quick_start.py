"""Train on four fifths of the embedded digits' training images with some settings, and probe on the fifth held out.

    python benchmarks/quick_start.py [RECIPE] [key=value ...]

The test images are never used. The settings of the recipe `quickstart` were chosen with it: results/quick-start.md.
"""

from __future__ import annotations

import sys
import tempfile
import time

from torch import Tensor
from torch.utils.data import Dataset

import kontrast
from kontrast.data.digits import digits


class Pictures(Dataset):
    """The training images with their labels, of which a run holds out a fifth of each class."""

    def __init__(self) -> None:
        self.images = digits("train")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        assert self.images.labels is not None
        return self.images.images[position], int(self.images.labels[position])


def main() -> None:
    from kontrast.config.overrides import parse_override

    names = [text for text in sys.argv[1:] if "=" not in text]
    settings = dict(parse_override(text) for text in sys.argv[1:] if "=" in text)
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        options = {"evaluation.every": 0, **settings}
        run = kontrast.pretrain(Pictures(), *names, out=out, say=lambda line: None, **options)
        seconds = time.perf_counter() - started
        found = {result.probe: result.accuracy for result in kontrast.probe(run) if result.features == "trained"}
    accuracies = "  ".join(f"{probe} {accuracy:.3f}" for probe, accuracy in found.items())
    print(f"{' '.join(sys.argv[1:])}: {accuracies}  in {seconds:.0f} s")


if __name__ == "__main__":
    main()
