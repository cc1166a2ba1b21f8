"""Choose and describe the device to compute on."""

from __future__ import annotations

import os
import re

import torch

from kontrast.errors import EnvironmentFault, UsageError


def choose_device(name: str) -> torch.device:
    """Return the device by its name: auto (CUDA if there is a GPU, else the CPU), cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise UsageError(f"unknown device {name!r}; allowed: auto, cpu, cuda, cuda:N")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = int(name.partition(":")[2] or os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise EnvironmentFault(f"--device {name}: there is no such usable NVIDIA GPU; use --device cpu or auto")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def describe_device(device: torch.device) -> str:
    """Return the name of the GPU, or the CPU's number of cores and threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
