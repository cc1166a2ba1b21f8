"""Train in the ranks of a Ray cluster, with Ray Train. It starts the ranks, and restarts them if one is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kontrast import distributed, plugins
from kontrast.engines.ray_cluster import Cluster, first_line
from kontrast.engines.ray_messages import Job, Messages, Send, Terminal, in_thread, pass_on
from kontrast.errors import EnvironmentFault, KontrastError, LostRank, Stopped, UsageError
from kontrast.files import disk_faults
from kontrast.training.progress import tell
from kontrast.training.signals import Interrupted, StopSignals, request_stop

T = TypeVar("T")
MAX_RESTARTS = 3
GRACE_SECONDS = 10.0
"""How long another rank that fails waits for the first one to report: Ray ends all ranks as soon as one has failed."""


def pretrain_on_ray(
    train: Callable[..., T],
    out: str | os.PathLike[str],
    *,
    resume: bool,
    workers: int | None,
    device: str,
    max_restarts: int | None,
    began: float | None = None,
    to_terminal: bool = False,
    say: Callable[[str], None],
) -> T:
    """Call `train(out=..., began=..., say=...)` in the ranks of a Ray cluster, and return the first rank's result.

    Args:
        train: trains in the process group that it finds, and can be pickled.
        out: the run folder.
        resume: whether `out` has to contain a run.
        workers: the number of ranks. Default: the GPUs of the cluster, or 1 without any.
        device: "auto", "cpu" or "cuda".
        max_restarts: how often lost ranks are restarted. Default: 3.
        began: when the budget of `--minutes` began, by `time.monotonic`. Default: now.
        to_terminal: whether the lines of the ranks go to standard error, and not to `say`.
        say: receives messages for people.
    """
    from kontrast.training.run_folder import RunFolder

    folder = RunFolder(os.path.abspath(out))
    if not resume:
        folder.refuse_content()
    elif not folder.holds_run:
        raise UsageError(f"--resume: {folder.path} contains no run; start one without --resume")
    start = time.time() - (0.0 if began is None else time.monotonic() - began)  # clocks that nodes have in common
    place = next(place for place in folder.path.parents if place.is_dir())
    storage = place / f".{folder.path.name}.ray"
    marker = storage / "command"

    def resume_command() -> str:
        with contextlib.suppress(KontrastError, KeyError):
            return folder.info()["resume"]
        return "the same command"

    try:
        with disk_faults(storage):
            storage.mkdir(exist_ok=True)
            marker.touch()
        job = Job(Rank(train, str(folder.path), start), str(marker), to_terminal)
        return run_ranks(
            job, workers, device, MAX_RESTARTS if max_restarts is None else max_restarts, storage, resume_command, say
        )
    finally:
        shutil.rmtree(storage, ignore_errors=True)


@dataclass
class Rank:
    """Calls `train` in one rank. `start` is when the budget began, in seconds since 1970."""

    train: Callable[..., Any]
    out: str
    start: float

    def __call__(self, say: Callable[[str], None]) -> Any:
        return self.train(out=self.out, began=time.monotonic() - (time.time() - self.start), say=say)


def run_ranks(
    job: Job, workers: int | None, device: str, max_restarts: int, storage: Path, resume_command: Callable[[], str],
    say: Callable[[str], None],
) -> Any:  # fmt: skip
    """Run a job in the ranks of a process group, and return the first rank's result.

    Ray Train restarts all ranks if one is lost, up to `max_restarts` times. Errors that would only come again end the
    job, as do signals, after the step that is being computed is saved.
    """

    def work(send: Send) -> Any:
        gpus = cluster.gpus(device)
        count = workers or gpus or 1
        cluster.check_room(count, gpus > 0, lambda line: send(("say", line)))
        messages = cluster.ray.remote(num_cpus=0)(Messages).remote()
        send(("connected", messages))
        threading.Thread(target=pass_on, args=(cluster.ray, messages, send), daemon=True).start()
        error = fit(job, messages, count, gpus > 0, max_restarts, storage)
        if not cluster.is_left:
            cluster.ray.get(messages.put.remote("fit", error))
        ended.wait()

    ended = threading.Event()
    with Cluster(workers) as cluster, StopSignals() as stop:
        try:
            return follow(in_thread(work), stop, max_restarts, resume_command, say)
        finally:
            ended.set()


def fit(job: Job, messages: Any, workers: int, gpus: bool, max_restarts: int, storage: Path) -> str:
    """Let Ray Train run the ranks; return "", or the first line of the error with which it gave up."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"job": job, "messages": messages},
        torch_config=TorchConfig(timeout_s=int(distributed.START_SECONDS)),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
        run_config=RunConfig(
            name="ray", storage_path=str(storage), failure_config=FailureConfig(max_failures=max_restarts)
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        return first_line(error)
    return ""


def follow(
    events: Iterator[tuple[str, Any]], stop: StopSignals, max_restarts: int, resume_command: Callable[[], str],
    say: Callable[[str], None],
) -> Any:  # fmt: skip
    """Print what the ranks say and tell them of signals until the job ends; return its result or raise its error."""
    result: Any = None
    failed: list[tuple[int, KontrastError, bool]] = []
    messages: Any = None
    has_told = False
    for kind, value in events:
        if stop.signal is not None and messages is not None and not has_told:
            has_told = True
            messages.stop.remote(stop.signal)
        if kind == "connected":
            messages = value
        elif kind == "began":
            stop.patient = True  # from now on, the ranks decide what is saved
            if value > 1:
                say(f"a worker failed: restart {value - 1} of {max_restarts}")
                failed = [entry for entry in failed if entry[2]]
        elif kind == "text":
            with contextlib.suppress(OSError):  # nobody reads it any more, which is no reason to stop
                print(value, end="", file=sys.stderr, flush=True)
        elif kind == "say":
            say(value)
        elif kind == "failed":
            failed.append(value)
            if value[0] == 0 and value[2]:
                raise value[1]
        elif kind == "result":
            result = (value,)
        elif kind == "fit":
            if result is not None:
                return result[0]
            raise failure(value, [error for _, error, _ in failed], stop, max_restarts, resume_command())
    raise AssertionError("the thread of Ray ended before the job")


def failure(
    reason: str, errors: list[KontrastError], stop: StopSignals, max_restarts: int, command: str
) -> KontrastError:
    """Return the error of a job whose ranks have ended without a result."""
    if stop.signal is not None:
        return stop.error("its newest checkpoint", command)
    for error in sorted(errors, key=lambda error: isinstance(error, LostRank)):
        if not isinstance(error, LostRank):
            return error
    used = f"after {max_restarts} restarts" if max_restarts else "without --max-restarts"
    lost = first_line(errors[0]) if errors else reason
    return EnvironmentFault(f"a worker ended {used} ({lost}): out of memory? Resume with: {command}")


def run_rank(config: dict[str, Any]) -> None:
    """Run the function of a job as one rank, and report its result or error. Ray Train calls this in each worker."""
    import ray
    import ray.train.torch

    messages, rank = config["messages"], ray.train.get_context().get_world_rank()
    restarts = int(distributed.broadcast(str(ray.get(messages.begin.remote())) if rank == 0 else ""))
    if restarts < 0:
        return
    threading.Thread(target=lambda: request_stop(ray.get(messages.wait_for_stop.remote())), daemon=True).start()
    terminal = Terminal(messages, config["job"].is_terminal) if rank == 0 else sys.stderr

    def say(line: str) -> None:
        messages.put.remote("say", line)

    device = ray.train.torch.get_device()
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)  # after a restart, the run resumes by itself
    try:
        with contextlib.redirect_stderr(terminal):  # and back, before Ray prints a traceback
            config["job"].enter()
            value = config["job"].function(say=tell if config["job"].to_terminal else say)
        if rank == 0:
            ray.get(messages.put.remote("result", value))
    except (Stopped, Interrupted) as error:  # every rank stops at this step, and only the first one still saves it
        if rank == 0:
            ray.get(messages.fail.remote(rank, error, True))
    except Exception as error:
        final = isinstance(error, KontrastError) and not isinstance(error, LostRank)
        if "--debug" in sys.argv:
            messages.put.remote("text", traceback.format_exc())
        ray.get(messages.fail.remote(rank, plugins.explain_error(error), final))
        if rank and final:
            ray.wait([messages.wait_for_end.remote()], timeout=GRACE_SECONDS)
        raise
