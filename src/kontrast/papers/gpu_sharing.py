"""Several processes on one GPU at the same moment, through NVIDIA's multi-process service, where the driver has it.

Without it they take turns, and several small runs at once are slower in all than one after the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
SECONDS = 30


def control_program() -> str | None:
    """Where the service's control program is; containers have the driver's programs in a folder of their own."""
    return shutil.which(CONTROL, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/nvidia/bin"]))


@contextmanager
def shared_gpu(device: str, say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """The variables under which processes share the GPU; empty where there is none, or they are set already."""
    program = control_program()
    if device == "cpu" or not torch.cuda.is_available() or PIPES in os.environ:
        yield {}
        return
    if program is None:
        say(f"the runs take turns on the GPU: there is no {CONTROL} here to let them share it")
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="kontrast-mps-", ignore_cleanup_errors=True) as place:
        variables = {PIPES: place, LOGS: str(Path(place) / "logs")}
        (Path(place) / "logs").mkdir()
        surroundings = os.environ | variables
        trouble = started(program, surroundings)
        if trouble:
            say(f"the runs take turns on the GPU: {CONTROL} did not start ({trouble})")
            yield {}
            return
        try:
            yield variables
        finally:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([program], input=b"quit\n", env=surroundings, capture_output=True, timeout=SECONDS)


def started(program: str, surroundings: dict[str, str]) -> str:
    """Start the service in the background; what kept it from starting, or nothing."""
    try:
        # A group of its own: Ctrl-C is for the runs, which save; the service must outlive them.
        ended = subprocess.run([program, "-d"], env=surroundings, capture_output=True, timeout=SECONDS, process_group=0)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (ended.stdout + ended.stderr).decode(errors="replace").strip()
    return "" if ended.returncode == 0 else said[-200:] or f"exit {ended.returncode}"
