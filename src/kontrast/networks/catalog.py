"""Encoders, heads and predictors by name, and the one way to build each.

N images, C channels, h x w pixels, F width of the representation that probes read, D width of the projection.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from kontrast.errors import UsageError
from kontrast.registry import Registry

FOREIGN = "timm:NAME and torchvision:NAME reach those libraries"

ENCODERS = Registry(  # [N,C,h,w] -> [N,F]
    "encoder", hints=dict.fromkeys(("", "timm", "torchvision"), FOREIGN), given=("channels", "size")
)
HEADS = Registry("head", given=("inputs",))  # [N,F] -> [N,D]
PREDICTORS = Registry("predictor", given=("inputs",))  # [N,D] -> [N,D]

Module = TypeVar("Module", bound=nn.Module)


class Encoder(nn.Module):
    """What `encoder` builds, to type checkers: the networks themselves are of other classes, since a class whose
    attributes are annotated can't become TorchScript."""

    width: int
    size: int
    channels: int


class Head(nn.Module):
    """What `head` builds, to type checkers."""

    width: int


def encoder(name: str, *, channels: int = 3, size: int = 32, **arguments: Any) -> Encoder:
    """An encoder [N,channels,size,size] -> [N,width] with `.width`, `.size` and `.channels`; `timm:NAME` and
    `torchvision:NAME` reach those libraries."""
    whole("channels", channels)
    whole("size", size)
    library, colon, model = name.partition(":")
    if colon:
        from kontrast.networks.external import foreign_encoder

        module: Encoder = foreign_encoder(library, model, channels=channels, size=size, **arguments)
    else:
        module = ENCODERS.build(name, channels=channels, size=size, **_switches(ENCODERS, name, arguments))
        _check_width(ENCODERS, name, module)
    module.size, module.channels = size, channels
    return module


def head(name: str, width: int, **arguments: Any) -> Head:
    """A projection head [N,width] -> [N,D], D in its `.width`."""
    module: Head = HEADS.build(name, inputs=whole("width", width), **_widths(_switches(HEADS, name, arguments)))
    _check_width(HEADS, name, module)
    return module


def predictor(name: str, width: int, **arguments: Any) -> nn.Module:
    """A predictor [N,width] -> [N,width] on top of the online projections."""
    return PREDICTORS.build(name, inputs=whole("width", width), **_widths(_switches(PREDICTORS, name, arguments)))


def _check_width(registry: Registry, name: str, module: nn.Module) -> None:
    """One of the user's own may lack what the next part is built by."""
    if not isinstance(getattr(module, "width", None), int):
        raise UsageError(f"{registry.kind} {name!r} has no width: set self.width, the length of the rows it returns")


def _switches(registry: Registry, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, whose switches must be true or false: the word "false" would switch on."""
    for key, parameter in registry.arguments(name).items():
        if isinstance(parameter.default, bool) and not isinstance(arguments.get(key, False), bool):
            raise UsageError(f"{key} = {arguments[key]!r}: give true or false")
    return arguments


def _widths(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a head, whose widths must be whole numbers."""
    for name in ("outputs", "hidden"):
        if arguments.get(name) is not None:
            whole(name, arguments[name])
    return arguments


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """The value, when it is a whole number of at least `least`, and where asked at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} = {value!r}: give a whole number of at least {least}")
    if most is not None and value > most:
        raise UsageError(f"{name} = {value!r}: give a whole number of at most {most}")
    return value
