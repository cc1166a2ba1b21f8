"""Connect to a Ray cluster: the one that RAY_ADDRESS names, or one on this machine that ends with the command.

No files are sent to it: every node needs kontrast, the working directory, the images and the run folder at the same
paths, on storage that the nodes share.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kontrast.engines.ray_messages import Send, in_thread
from kontrast.errors import EnvironmentFault, UsageError
from kontrast.registry import nearest
from kontrast.training.signals import StopSignals

ENGINES = ("local", "ray")
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray reports usage to its makers unless told not to
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # lines of the first rank go to the command, not to Ray's log
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how soon the end of the ranks is noticed
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_worker_niceness": "0",  # on this machine, workers have the priority of the command, as under torchrun
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
}
"""Environment variables of Ray, if the user has not set them."""


def check_engine(engine: str, workers: int | None, max_restarts: int | None = None) -> bool:
    """Return whether the engine is Ray; raise if it is unknown or if an option doesn't belong to it."""
    if engine not in ENGINES:
        raise UsageError(f"unknown --engine {engine!r}: {nearest(engine, ENGINES)}")
    for option, value, least in (("--workers", workers, 1), ("--max-restarts", max_restarts, 0)):
        if value is not None and engine != "ray":
            advice = "start ranks without Ray by torchrun --nproc-per-node N -m kontrast ..."
            raise UsageError(f"{option} {value} is for --engine ray: {advice}")
        if value is not None and value < least:
            raise UsageError(f"{option} {value}: give {least} or more")
    if engine == "ray" and "WORLD_SIZE" in os.environ:
        raise UsageError("--engine ray starts the ranks itself: don't start it with torchrun, or unset WORLD_SIZE")
    return engine == "ray"


def import_ray() -> Any:
    """Import ray with the libraries that are used here, or raise an error that says how to install them."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
        import ray.train.torch
    except ImportError:
        raise EnvironmentFault("--engine ray needs Ray: pip install 'kontrast[ray]'") from None
    return ray


class Cluster:
    """A connection to a Ray cluster: `with Cluster(workers) as cluster: ...`.

    A connection that the caller's program made is used and left open. What Ray prints goes to standard error.

    Args:
        workers: for how many Ray that is started on this machine must have room.
    """

    def __init__(self, workers: int | None):
        self.ray, self.workers = import_ray(), workers or 1
        self.address = os.environ.get("RAY_ADDRESS", "")
        self._leaving, self._is_ours = threading.Event(), False
        self._redirection = contextlib.redirect_stdout(OwnThread())

    @property
    def is_left(self) -> bool:
        """Whether the connection was ended. From then on, a call of Ray would start another cluster."""
        return self._leaving.is_set()

    def __enter__(self) -> Cluster:
        self._redirection.__enter__()
        try:
            with StopSignals("stopped before any work began; run the same command again"):
                next(kind for kind, _ in in_thread(self._stay_connected) if kind == "connected")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._redirection.__exit__(None, None, None)
        if self._is_ours:
            self.ray.shutdown()

    def _stay_connected(self, send: Send) -> None:
        """Connect, in a thread of its own: in the main thread, Ray would replace the handler of SIGTERM for good.

        The processes of Ray end with the thread that started them, so it waits for the end of the connection.
        """
        if not self.ray.is_initialized():
            self._connect()
            self._is_ours = True
            if self.is_left:  # a signal ended the command meanwhile
                self.ray.shutdown()
        send(("connected", None))
        self._leaving.wait()

    def _connect(self) -> None:
        if self.address:
            check_answers(self.address)
            options: dict[str, Any] = {"address": self.address}
        else:
            cores = max(self.workers, os.cpu_count() or 1)
            options = {"address": "local", "num_cpus": cores, "include_dashboard": False}
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            with folder_of_workers():
                self.ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises some faults of its start as plain exceptions
            place = f"no Ray cluster answers at RAY_ADDRESS={self.address}" if self.address else "Ray does not start"
            raise EnvironmentFault(f"{place}: {first_line(error)}") from None

    def gpus(self, device: str) -> int:
        """Return how many GPUs there are to compute on; 0 if `device` or the cluster means CPUs."""
        if device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"--device {device}: with --engine ray give auto, cpu or cuda; Ray chooses which GPUs")
        count = int(self.ray.cluster_resources().get("GPU", 0))
        return 0 if device == "cpu" else max(count, int(device == "cuda"))

    def check_room(self, workers: int, gpus: bool, say: Callable[[str], None]) -> None:
        """Raise if this machine has too few GPUs; say so if a cluster, which may grow, has too little of anything."""
        kind = "GPU" if gpus else "CPU"
        there = int(self.ray.cluster_resources().get(kind, 0))
        if there >= workers:
            return
        needs = f"{workers} workers need a {kind} each, and there are {there}"
        if not self.address:
            raise EnvironmentFault(f"{needs} on this machine: use --workers {max(there, 1)}, or --device cpu")
        say(f"{needs}: waiting until the cluster at {self.address} has more")


def check_answers(address: str) -> None:
    """Raise if nothing listens at `host:port`: Ray itself would try for minutes. Other forms are left to Ray."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            reason = error.strerror or error
            raise EnvironmentFault(f"no Ray cluster answers at RAY_ADDRESS={address}: {reason}") from None


class OwnThread(io.TextIOBase):
    """Standard output for this thread alone; what other threads print goes to standard error."""

    def __init__(self) -> None:
        self.own, self.stream = threading.get_ident(), sys.stdout

    def write(self, text: str) -> int:
        return (self.stream if threading.get_ident() == self.own else sys.stderr).write(text)

    def flush(self) -> None:
        self.stream.flush()


@contextlib.contextmanager
def folder_of_workers() -> Iterator[None]:
    """Leave a folder that this process doesn't import from: Ray's workers import from the folder it was started in."""
    here = os.getcwd()
    with contextlib.chdir(here if here in map(os.path.abspath, sys.path) else os.path.abspath(os.sep)):
        yield


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
