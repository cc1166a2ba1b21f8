"""Choose and describe the device to compute on."""

from __future__ import annotations

import os
import platform
import re

import torch

from kontrast.errors import EnvironmentFault, UsageError


def choose_device(name: str) -> torch.device:
    """Return the device by its name: auto (an NVIDIA GPU, else Apple's GPU, else the CPU), cpu, mps, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", name):
        raise UsageError(f"unknown device {name!r}; allowed: auto, cpu, mps, cuda, cuda:N")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1  # ranks can't send what is on Apple's GPU to each other
    if name == "mps" or (name == "auto" and not torch.cuda.is_available()):
        if torch.backends.mps.is_available() and not several:
            return torch.device("mps")
        if name == "mps":
            why = "it serves one process" if several else "there is no usable GPU of Apple"
            raise EnvironmentFault(f"--device mps: {why}; use --device cpu or auto")
    if name in ("cpu", "auto") and (name == "cpu" or not torch.cuda.is_available()):
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
    if device.type == "mps":
        return f"Apple's GPU of {platform.processor() or 'this machine'}"
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that draws on the device unless another is given. To seed it is far faster than
    `torch.manual_seed`, which seeds those of all devices."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.mps._get_default_mps_generator() if device.type == "mps" else torch.default_generator


MPS_NOTE = (
    "training on Apple's GPU: every step is eager, in float32 and without fused kernels; random draws, whitening and "
    "other float64 work are done on the CPU, which is slower; if --device cpu is faster, use it"
)
