"""Encoders, heads and predictors by name, and the functions that build them.

N images, C channels, h x w pixels, F width of the representation that probes read, D width of the projection.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from torch import nn

from kontrast.errors import UsageError
from kontrast.networks.checks import check_whole
from kontrast.networks.external import LIBRARIES, build_external
from kontrast.registry import Registry

EXTERNAL = dict.fromkeys(("", *LIBRARIES), "timm:NAME and torchvision:NAME are encoders of those libraries")
ENCODERS = Registry("encoder", hints=EXTERNAL, given=("channels", "size"))  # [N,C,h,w] -> [N,F]
HEADS = Registry("head", given=("inputs",))  # [N,F] -> [N,D]
PREDICTORS = Registry("predictor", given=("inputs",))  # [N,D] -> [N,D]

Module = TypeVar("Module", bound=nn.Module)


class Encoder(nn.Module):
    """The type of what `encoder` returns, for type checkers: a network with `width`, `size` and `channels`.

    The networks don't inherit from it, because TorchScript can't compile a class with annotated attributes.
    """

    width: int
    size: int
    channels: int


class Head(nn.Module):
    """The type of what `head` returns, for type checkers: a network with `width`."""

    width: int


def encoder(name: str, *, channels: int = 3, size: int = 32, **arguments: Any) -> Encoder:
    """Build an encoder by name, with random weights.

    Args:
        name: a name in `ENCODERS`, "timm:NAME" or "torchvision:NAME".
        channels: channels of the images, default 3.
        size: height and width of the images in pixels, default 32.
        **arguments: further arguments of the encoder, such as `stem` of a ResNet; `kontrast explain NAME` lists them.

    Returns:
        A module with the attributes `width` (F), `size` and `channels`.

    Shape:
        - input: [N,channels,size,size]
        - output: [N,F]

    Example:
        >>> import torch
        >>> network = encoder("resnet-18", size=32)
        >>> network(torch.zeros(2, 3, 32, 32)).shape, network.width
        (torch.Size([2, 512]), 512)
    """
    check_whole("channels", channels)
    check_whole("size", size)
    library, colon, model = name.partition(":")
    if colon and library in LIBRARIES:
        module: Encoder = build_external(library, model, channels=channels, size=size, **arguments)
    else:
        module = build_named(ENCODERS, name, arguments, channels=channels, size=size)
    module.size, module.channels = size, channels
    return module


def head(name: str, width: int, **arguments: Any) -> Head:
    """Build a projection head by name.

    Args:
        name: a name in `HEADS`.
        width: width F of the encoder's representation.
        **arguments: further arguments of the head, such as `outputs` (D) and `hidden`.

    Returns:
        A module with the attribute `width` (D).

    Shape:
        - input: [N,F]
        - output: [N,D]

    Example:
        >>> import torch
        >>> head("simclr", width=512, outputs=64)(torch.zeros(2, 512)).shape
        torch.Size([2, 64])
    """
    return build_named(HEADS, name, arguments, inputs=check_whole("width", width))


def predictor(name: str, width: int, **arguments: Any) -> nn.Module:
    """Build a predictor by name, which BYOL, SimSiam and MoCo v3 put on the student's projections.

    Args:
        name: a name in `PREDICTORS`.
        width: width D of the projection.
        **arguments: further arguments of the predictor, such as `hidden`.

    Shape:
        - input: [N,D]
        - output: [N,D]

    Example:
        >>> import torch
        >>> predictor("byol", width=64)(torch.zeros(2, 64)).shape
        torch.Size([2, 64])
    """
    return build_named(PREDICTORS, name, arguments, inputs=check_whole("width", width))


def build_named(registry: Registry, name: str, arguments: dict[str, Any], **given: int) -> Any:
    """Build an entry after checking its switches and widths: the string "false" would count as true."""
    for key, parameter in registry.arguments(name).items():
        value = arguments.get(key)
        if isinstance(parameter.default, bool) and not isinstance(value, bool | None):
            raise UsageError(f"{key} = {value!r}: give true or false")
        if key in ("outputs", "hidden") and value is not None:
            check_whole(key, value)
    module = registry.build(name, **given, **arguments)
    if registry is not PREDICTORS and not isinstance(getattr(module, "width", None), int):
        raise UsageError(f"{registry.kind} {name!r} has no width: set self.width to the number of values it returns")
    return module


def register_sizes(network: type[nn.Module], sizes: dict[str, tuple[Any, ...]]) -> None:
    """Register an encoder under several names, each with its own values of the first arguments."""
    for name, arguments in sizes.items():
        entry: Any = partial(network, *arguments)
        entry.__name__, entry.__doc__ = network.__name__, network.__doc__
        ENCODERS.register(name)(entry)
