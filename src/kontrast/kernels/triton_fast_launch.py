"""Launch a Triton kernel that was compiled before without asking Triton again which variant fits the arguments.

Triton inspects every argument at every launch, which takes longer than a kernel for a small batch runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kontrast.kernels.dense import INTERPRETED


class FastKernel:
    """A Triton kernel whose compiled variants are found by a key.

    Triton compiles a variant for each set of constants and options, for the types of the tensors, for pointers that are
    aligned to 16 bytes or not, and for numbers that it specializes. Such numbers are given as `specialized`; all others
    must not be specialized (`do_not_specialize`).
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.compiled: dict[Any, Any] = {}

    def launch(
        self, grid: tuple[int, int, int], specialized: int, arguments: list[Any], constants: dict[str, Any]
    ) -> None:
        """Launch with positional arguments, the constants in the order of the kernel's signature, and options last."""
        if INTERPRETED:
            self.kernel[grid](*arguments, **constants)
            return
        values = list(constants.values())
        key: list[Any] = [torch.cuda.current_device(), specialized, *values]
        addresses: list[Any] = []
        for x in arguments:
            if isinstance(x, Tensor):
                address = x.data_ptr()
                key += (x.dtype, address % 16 == 0)
                addresses.append(address)  # as a number: Triton would ask the driver about each tensor
            else:
                addresses.append(x)
        compiled = self.compiled.get(tuple(key))
        if compiled is None:
            names = self.kernel.arg_names[len(arguments) :]
            assert list(constants)[: len(names)] == names, "the constants are not in the order of the signature"
            self.compiled[tuple(key)] = self.kernel[grid](*arguments, **constants)
            return
        compiled[grid](*addresses, *values[: len(self.kernel.arg_names) - len(arguments)])
