"""A saved classifier: an encoder, a linear layer and the names of its labels.

Its folder is a run folder, so that every command that takes a run takes it too (embed, neighbors, lens, ...), with
more files:

    classifier.safetensors   weight [C,F] and bias [C] of the linear layer
    classifier.json          labels, how it was trained, how accurate it is, the most uncertain images
    labels.csv               the images that it was trained on, with their labels
    README.md                a card for people

B images, F features, C classes.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.errors import CheckpointError, UsageError
from kontrast.files import read_bytes, read_json
from kontrast.runs.run import Run
from kontrast.training.checkpoints import read_weights
from kontrast.training.run_folder import sha256

NEWEST = 1
"""The version of classifier.json."""


class ClassifierNetwork(nn.Module):
    """Images to the probabilities of the classes, [B,C]; `width` is the number of classes."""

    gives = "probabilities"

    def __init__(self, encoder: nn.Module, layer: nn.Linear):
        super().__init__()
        self.encoder, self.layer, self.width = encoder, layer, layer.out_features

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(self.encoder(images)).softmax(1)


class Classifier(Run):
    """A folder that `kontrast finetune` wrote. It is a `Run`, and also has labels.

    Args:
        path: The folder.

    Example:
        >>> import kontrast
        >>> model = kontrast.finetune("runs/digits", linear=True, out="model", device="cpu", say=lambda line: None)
        >>> Classifier("model").labels[:3]
        ['0', '1', '2']
        >>> Classifier("model").network()(model.classifier.prepare("photo.png")).shape
        torch.Size([1, 10])
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        if not is_classifier(path):
            raise UsageError(
                f"{self.path} is a run without a classifier: train one with `kontrast finetune {self.path} DATA`"
            )

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The content of classifier.json, checked as far as it is used."""
        path, tree = self.path / "classifier.json", read_json(self.path / "classifier.json")
        facts = tree if isinstance(tree, dict) else {}
        if isinstance(facts.get("version"), int) and facts["version"] > NEWEST:
            raise CheckpointError(f"{path} was written by a newer kontrast: upgrade to read it")
        labels = facts.get("labels")
        if not isinstance(labels, list) or len(labels) < 2 or not all(isinstance(one, str) for one in labels):
            raise CheckpointError(f"{path} is damaged: it has no list of two or more labels")
        return facts

    @property
    def labels(self) -> list[str]:
        """The names of the classes, in the order of the probabilities."""
        return self.facts["labels"]

    def layer(self) -> nn.Linear:
        """Return the linear layer."""
        path = self.path / "classifier.safetensors"
        weights, shape = read_weights(path), (len(self.labels), self.untrained().encoder.width)
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
        if found != {"weight": (shape, torch.float32), "bias": (shape[:1], torch.float32)}:
            problem = f"does not fit {shape[0]} labels and {shape[1]} features"
        elif not all(torch.isfinite(tensor).all() for tensor in weights.values()):
            problem = "holds NaN or infinity: its training went wrong"
        elif self.facts.get("sha256") != self.classifier_digest():
            problem = "is damaged or belongs to another classifier.json (its SHA-256 differs)"
        else:
            layer = nn.Linear(shape[1], shape[0])
            layer.load_state_dict(weights)
            return layer
        raise CheckpointError(f"{path} {problem}")

    def classifier_digest(self) -> str:
        """Return the SHA-256 of the linear layer's file."""
        return sha256(read_bytes(self.path / "classifier.safetensors"))

    def network(self, device: torch.device | str = "cpu") -> ClassifierNetwork:
        """Return encoder and linear layer in eval mode: images [B,C,h,w], as `prepare` returns them -> [B,C]."""
        return ClassifierNetwork(self.encoder(device), self.layer().to(device)).eval()


def is_classifier(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder has a classifier."""
    return os.path.isfile(os.path.join(path, "classifier.json"))


def entropy(probabilities: Tensor) -> Tensor:
    """Return how uncertain each row of probabilities [B,C] is, from 0 (certain) to 1 (all classes are as likely)."""
    return torch.special.entr(probabilities).sum(1) / torch.log(torch.tensor(float(probabilities.shape[1])))
