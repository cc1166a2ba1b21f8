"""A run folder opened again: its recipe, its encoder, its data."""

from __future__ import annotations

import os

import torch

from kontrast.errors import EnvironmentFault, UsageError


def choose_device(name: str) -> torch.device:
    """auto: CUDA where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}; allowed: auto, cpu, cuda, cuda:N") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise EnvironmentFault("--device cuda: no usable NVIDIA GPU here; use --device cpu or auto")
        index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", 0))
        if index >= torch.cuda.device_count():
            raise EnvironmentFault(f"--device cuda:{index}: this machine has {torch.cuda.device_count()} GPU(s)")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise UsageError(f"--device {name}: kontrast trains on cpu or cuda")
    return device


def device_words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
