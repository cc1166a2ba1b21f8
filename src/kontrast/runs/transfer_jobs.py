"""Several measurements of a transfer at once, in processes that share the device; small ones don't fill a large GPU.

Each process repeats the command for its part of the measurements and stores what it finds in the same transfer.json.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from kontrast.files import disk_faults
from kontrast.import_path import python_environment
from kontrast.training.gpu_sharing import shared_gpu

PART = "KONTRAST_TRANSFER_PART"
"""The environment variable that tells a process which part it measures, as `1/3` for the second of three."""
T = TypeVar("T")


def in_part() -> bool:
    """Return whether this process measures a part for another one, which holds the lock on the results."""
    return PART in os.environ


def own_part(cases: Sequence[T]) -> Sequence[T]:
    """Return the cases that this process measures: all of them, or its part."""
    number, parts = map(int, os.environ.get(PART, "0/1").split("/"))
    return cases[number::parts]


def measure_in_processes(
    arguments: Sequence[str], jobs: int, folder: Path, device: torch.device, say: Callable[[str], None]
) -> None:
    """Run `kontrast transfer` in `jobs` processes, each for its part, and wait for them.

    Their output goes to job-N.log in the folder. What a process could not measure, because it failed, is left to the
    caller, who meets the same error.
    """
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    command = [sys.executable, "-m", "kontrast", "transfer", *arguments]
    with ExitStack() as stack:
        variables = stack.enter_context(shared_gpu(device.type, say))
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(end_all, processes)
        for number in range(jobs):
            log = folder / f"job-{number}.log"
            with disk_faults(log):
                file = stack.enter_context(open(log, "wb"))
            part = {"OMP_NUM_THREADS": threads, **python_environment(), **variables, PART: f"{number}/{jobs}"}
            processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=part))
        failed = [number for number, process in enumerate(processes) if process.wait()]
    if failed:
        logs = " and ".join(f"job-{number}.log" for number in failed)
        say(f"{len(failed)} of {jobs} processes failed (see {folder}/{logs}): what they left is measured now")


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
