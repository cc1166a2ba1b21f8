"""Measure the peak memory of a piece of work: of the GPU, or of the process on a CPU under Linux."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

PROCESS = Path("/proc/self")


class PeakMemory:
    """`with PeakMemory(device) as memory: ...`, then `memory.bytes`; None if the system doesn't provide the number."""

    bytes: int | None = None

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):
                (PROCESS / "clear_refs").write_text("5")  # Linux: 5 resets the peak of resident memory
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
            return
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = (PROCESS / "status").read_text(encoding="utf-8", errors="replace").splitlines()
            self.bytes = 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
