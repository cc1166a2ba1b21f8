"""Launch a Triton kernel that was compiled before without asking Triton again which variant fits the arguments.

Triton inspects every argument at every launch, which takes longer than a kernel for a small batch runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kontrast.kernels.dense import INTERPRETED


class Places(NamedTuple):
    """The places of the arguments on which a variant depends, other than by their types."""

    tensors: list[int]
    descriptors: list[int]
    numbers: list[int]


class FastKernel:
    """A decorator over `triton.jit`: `kernel[grid](*arguments, **constants)` finds the compiled variant by a key.

    Triton compiles a variant for each set of constants and options, for the types of the arguments, for pointers that
    are aligned to 16 bytes or not, and for some values of the whole numbers that are not in `do_not_specialize`. Give
    tensors and numbers by position, constants and options by name.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.compiled: dict[Any, tuple[Any, list[Any]]] = {}
        self.places: dict[tuple[type, ...], Places] = {}
        self.specialized = frozenset() if INTERPRETED else frozenset(
            place for place, p in enumerate(kernel.params) if not (p.is_constexpr or p.do_not_specialize)
        )  # fmt: skip

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if INTERPRETED:
            return self.kernel[grid]  # type: ignore[no-any-return]
        return functools.partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        kinds = tuple(map(type, arguments))
        places = self.places.get(kinds) or self.find_places(kinds)
        some = arguments[places.tensors[0]] if places.tensors else arguments[places.descriptors[0]].base
        device = some.get_device()
        if device != torch.cuda.current_device():  # Triton launches on the current device
            with torch.cuda.device(device):
                return self.launch(grid, *arguments, **constants)
        key: list[Any] = [device, kinds, *constants.values()]
        addresses: list[Any] = list(arguments)
        for place in places.tensors:
            x = arguments[place]
            addresses[place] = address = x.data_ptr()  # as a number: Triton would ask the driver about each tensor
            key += (x.dtype, address % 16 == 0)
        for place in places.descriptors:
            x = arguments[place]
            key += (x.base.dtype, *x.block_shape)
        for place in places.numbers:
            key.append(arguments[place])
        found = self.compiled.get(tuple(key))
        if found is None:
            names = self.kernel.arg_names[len(arguments) :]
            self.compiled[tuple(key)] = self.kernel[grid](*arguments, **constants), [constants[name] for name in names]
            return
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*addresses, *rest)

    def find_places(self, kinds: tuple[type, ...]) -> Places:
        """Return and remember what a variant for arguments of these types depends on."""
        found = Places([], [], [])
        for place, kind in enumerate(kinds):
            if issubclass(kind, Tensor):
                found.tensors.append(place)
            elif not issubclass(kind, int | float):
                found.descriptors.append(place)
            elif place in self.specialized and issubclass(kind, int):
                found.numbers.append(place)
        self.places[kinds] = found
        return found
