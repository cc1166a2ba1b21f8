"""Encoders of other libraries, "timm:NAME" and "torchvision:NAME", imported only if requested.

Weights are random and nothing is downloaded. [N,C,h,w] -> [N,F], without the model's classifier.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.errors import EnvironmentFault, UsageError
from kontrast.networks.checks import check_choice

LIBRARIES = ("timm", "torchvision")
FORBIDDEN = ("pretrained", "weights", "checkpoint", "cache", "file", "url", "hub")
"""Parts of arguments that would load or download something: a recipe may come from a stranger."""
AUXILIARY = ("googlenet", "inception_v3")
"""Models of torchvision whose auxiliary classifiers give several outputs in training."""


def build_external(library: str, name: str, *, channels: int, size: int, **arguments: Any) -> Any:
    """Build the named model of a library without its classifier and set its `width`."""
    if not re.fullmatch(r"[\w.-]+", name):  # timm would download hf-hub:someone/x and open local-dir:/x
        raise UsageError(f"{library}:{name} is not a model's name: give {library}:NAME")
    if loading := [key for key in arguments if any(word in key for word in FORBIDDEN)]:
        raise UsageError(f"{library}:{name} can't have {loading[0]}: weights are random, nothing is loaded")
    builder = from_timm if library == "timm" else from_torchvision
    try:
        model = builder(name, channels, size, arguments)
        model.width = measure_width(model, channels, size)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        # Other code reports a lack of memory; any other RuntimeError means that the image is too small to shrink.
        if isinstance(error, UsageError) or "alloc" in str(error).lower():
            raise
        reason = " ".join(str(error).split())
        raise UsageError(f"{library}:{name} can't be built with {arguments} at {size} pixels: {reason}") from error
    return model


def from_timm(name: str, channels: int, size: int, arguments: dict[str, Any]) -> Any:
    try:
        import timm
    except ImportError as error:
        raise EnvironmentFault(f"timm:{name} needs timm: pip install timm") from error
    check_choice("timm model", name.partition(".")[0], timm.list_models())
    arguments = {"pretrained": False, "num_classes": 0, "in_chans": channels, **arguments}
    try:
        return timm.create_model(name, img_size=size, **arguments)
    except TypeError:  # convolutional models take no img_size
        return timm.create_model(name, **arguments)


def from_torchvision(name: str, channels: int, size: int, arguments: dict[str, Any]) -> Any:
    from torchvision import models

    check_choice("torchvision model", name, models.list_models(module=models))
    if name.startswith("vit"):
        arguments = {"image_size": size, **arguments}
    if name in AUXILIARY:
        arguments = {"init_weights": True, **arguments, "aux_logits": False}
    model = models.get_model(name, weights=None, **arguments)
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise UsageError(f"torchvision:{name} has no linear classifier to remove: choose another model")
    replace_module(model, linear[-1], nn.Identity())
    set_input_channels(model, channels)
    return model


def set_input_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution if its number of input channels differs."""
    for name, m in model.named_modules():
        if isinstance(m, nn.Conv2d):
            if m.in_channels != channels:
                window: tuple[Any, Any, Any, Any] = (m.kernel_size, m.stride, m.padding, m.dilation)
                replace_module(model, name, nn.Conv2d(channels, m.out_channels, *window, bias=m.bias is not None))
            return


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def measure_width(model: nn.Module, channels: int, size: int) -> int:
    training = model.training
    with torch.no_grad():
        features: Tensor = model.eval()(torch.zeros(1, channels, size, size))
    model.train(training)
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise ValueError("its output is not one vector per image")
    return features.shape[1]
