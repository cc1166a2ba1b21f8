"""Launch a Triton kernel that was compiled before without asking Triton again which variant fits the arguments.

Triton inspects every argument at every launch, which takes longer than a kernel for a small batch runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.dense import INTERPRETED


class FastKernel:
    """A decorator over `triton.jit`: `kernel[grid](*arguments, **constants)` finds the compiled variant by a key.

    Triton compiles a variant for each set of constants and options, for the types of the tensors, for pointers that are
    aligned to 16 bytes or not, and for some values of the whole numbers that are not in `do_not_specialize`. Give
    tensors and numbers by position, constants and options by name.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.compiled: dict[Any, tuple[Any, list[str]]] = {}
        self.specialized = frozenset() if INTERPRETED else frozenset(
            place for place, p in enumerate(kernel.params) if not (p.is_constexpr or p.do_not_specialize)
        )  # fmt: skip

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if INTERPRETED:
            return self.kernel[grid]  # type: ignore[no-any-return]
        return functools.partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        key: list[Any] = [torch.cuda.current_device(), *constants.values()]
        addresses: list[Any] = []
        for place, x in enumerate(arguments):
            if isinstance(x, Tensor):
                address = x.data_ptr()
                key += (x.dtype, address % 16 == 0)
                x = address  # as a number: Triton would ask the driver about each tensor
            elif not isinstance(x, int | float):  # a tensor descriptor
                key += (x.base.dtype, *x.block_shape)
            elif place in self.specialized and isinstance(x, int):
                key.append(x)
            addresses.append(x)
        found = self.compiled.get(tuple(key))
        if found is None:
            names = self.kernel.arg_names[len(arguments) :]
            self.compiled[tuple(key)] = self.kernel[grid](*arguments, **constants), names
            return
        compiled, names = found
        compiled[(*grid, 1, 1)[:3]](*addresses, *[constants[name] for name in names])
