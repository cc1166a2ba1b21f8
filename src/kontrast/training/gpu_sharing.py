"""Lets several processes use one GPU at the same time through NVIDIA's multi-process service (MPS).

Without it they take turns, and several small runs at once take longer than one after another.
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
    """Find the service's control program, which containers may have outside of PATH."""
    return shutil.which(CONTROL, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/nvidia/bin"]))


@contextmanager
def shared_gpu(device: str, say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """Start the service and yield the environment variables that let processes use it.

    Without a GPU or the service, or if the variables are set already, it yields no variables.
    """
    if device == "cpu" or not torch.cuda.is_available() or PIPES in os.environ:
        yield {}
        return
    program = control_program() or CONTROL
    with tempfile.TemporaryDirectory(prefix="kontrast-mps-", ignore_cleanup_errors=True) as folder:
        variables = {PIPES: folder, LOGS: str(Path(folder) / "logs")}
        (Path(folder) / "logs").mkdir()
        environment = os.environ | variables
        failure = start_service(program, environment)
        if failure:
            say(f"the runs take turns on the GPU: {CONTROL} did not start ({failure})")
        try:
            yield {} if failure else variables
        finally:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([program], input=b"quit\n", env=environment, capture_output=True, timeout=SECONDS)


def start_service(program: str, environment: dict[str, str]) -> str:
    """Start the service in the background and return an empty text, or the reason why it did not start."""
    try:
        # In a process group of its own, because the service must outlive the runs, which save when Ctrl-C is pressed.
        done = subprocess.run([program, "-d"], env=environment, capture_output=True, timeout=SECONDS, process_group=0)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    output = (done.stdout + done.stderr).decode(errors="replace").strip()
    return "" if done.returncode == 0 else output[-200:] or f"exit code {done.returncode}"
