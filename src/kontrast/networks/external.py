"""Encoders of other libraries, "timm:NAME" and "torchvision:NAME", imported only if requested.

Weights are random and nothing is downloaded, except by `timm_weights`, for weights that the user asked for by name.
[N,C,h,w] -> [N,F], without the model's classifier.
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
    arguments = {"in_chans": channels, **arguments}
    fixed: dict[str, Any] = {"pretrained": False, "num_classes": 0}
    try:
        model = timm.create_model(name, img_size=size, **(fixed | arguments))
        arguments = {"img_size": size, **arguments}
    except TypeError:  # convolutional models take no img_size
        model = timm.create_model(name, **(fixed | arguments))
    model.built_with = arguments  # type: ignore[assignment]  # an export names them
    return model


def timm_normalization(name: str) -> dict[str, Any]:
    """Return mean and std of the images that timm's pretrained weights of a model were trained on."""
    place = f"timm:{name}"
    if not re.fullmatch(r"[\w.-]+", name):
        raise UsageError(f"{place} is not a model's name: give timm:NAME")
    try:
        import timm
    except ImportError as error:
        raise EnvironmentFault(f"{place} needs timm: pip install timm") from error
    check_choice("timm model", name.partition(".")[0], timm.list_models())
    if not timm.is_model_pretrained(name):
        raise UsageError(f"{place}: timm has no pretrained weights of this model; choose another, or give a file")
    known: Any = timm.get_pretrained_cfg(name)
    return {"mean": list(known.mean), "std": list(known.std)}


def timm_weights(name: str, channels: int, size: int) -> dict[str, Tensor]:
    """Return timm's own pretrained weights of a model, fitted by timm to the channels and the size of the images.

    timm downloads them, or reads them from its cache. The files are safetensors or are read with weights_only=True.
    """
    import timm

    place = f"timm:{name}"
    arguments: dict[str, Any] = {"pretrained": True, "num_classes": 0, "in_chans": channels}
    try:
        try:
            model = timm.create_model(name, img_size=size, **arguments)
        except TypeError:  # convolutional models take no img_size
            model = timm.create_model(name, **arguments)
    except Exception as error:  # the hub's client has many types of exceptions
        reason = " ".join(str(error).split())[:200]
        advice = "give a file that you have downloaded elsewhere"
        raise EnvironmentFault(f"{place}: its weights can't be downloaded ({reason}): {advice}") from error
    return model.state_dict()


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
    model.built_with = arguments  # type: ignore[assignment]  # an export names them
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
