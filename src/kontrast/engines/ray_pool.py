"""Apply a function to many items in processes of a Ray cluster, with an actor pool of Ray Data."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kontrast import plugins
from kontrast.engines.ray_cluster import Cluster, first_line
from kontrast.engines.ray_messages import Job, Messages, Send, in_thread, pass_on
from kontrast.errors import EnvironmentFault


class Pool:
    """Processes on a Ray cluster that apply a function to many items.

    Args:
        cluster: the connection.
        workers: how many. Default: one per GPU, or as many as the cluster has CPUs for the threads of each.
        device: "auto", "cpu" or "cuda".
        say: receives messages for people.

    Attributes:
        device: "cuda" or "cpu".
        threads: how many threads compute in each process, as many as in this one.
        cores: how many CPUs there are for each process.
    """

    def __init__(self, cluster: Cluster, workers: int | None, device: str, say: Callable[[str], None]):
        import torch

        gpus, cpus = cluster.gpus(device), int(cluster.ray.cluster_resources().get("CPU", 1))
        self.cluster, self.threads = cluster, torch.get_num_threads()
        self.workers = workers or gpus or max(1, cpus // self.threads)
        self.device = "cuda" if gpus else "cpu"
        self.cores = max(1, cpus // self.workers)
        cluster.check_room(self.workers, gpus > 0, say)

    def apply(self, make: Callable[[], Callable[[Any], dict[str, bytes]]], items: list[Any]) -> Iterator[Any]:
        """Yield (item, result) in any order, and None several times a second.

        Args:
            make: called once in each process; returns the function to apply to each item.
            items: numbers or texts.
        """
        ray = self.cluster.ray
        messages = ray.remote(num_cpus=0)(Messages).remote()

        def work(send: Send) -> None:
            threading.Thread(target=pass_on, args=(ray, messages, send), daemon=True).start()
            data = ray.data.from_items(items, override_num_blocks=min(len(items), 4096))
            arguments = {"job": Job(make), "messages": messages}
            pool = ray.data.ActorPoolStrategy(size=min(self.workers, len(items)))
            gpus = {"num_gpus": 1} if self.device == "cuda" else {}
            done = data.map_batches(
                PoolWorker, fn_constructor_kwargs=arguments, batch_size=1, compute=pool, num_cpus=1, **gpus
            )
            try:
                for row in done.iter_rows():
                    send(("item", (row.pop("item"), row)))
                send(("finished", None))
            except Exception as error:
                if not self.cluster.is_left:  # this message comes after that of a worker that failed
                    ray.get(messages.put.remote("broken", first_line(error)))
            ended.wait()

        ended = threading.Event()
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        try:
            for kind, value in in_thread(work):
                if kind == "failed":
                    raise value[1]
                if kind == "broken":
                    raise EnvironmentFault(f"Ray gave up: {value}")
                if kind == "finished":
                    return
                yield value if kind == "item" else None
        finally:
            ended.set()


class PoolWorker:
    """One process of a pool: applies the function of a job to each item. Ray Data makes it and calls it."""

    def __init__(self, job: Job, messages: Any):
        self.messages = messages
        with self.reporting():
            job.enter()
            self.function = job.function()

    def __call__(self, batch: dict[str, Any]) -> Any:
        import pyarrow

        with self.reporting():
            item = batch["item"].tolist()
            result = self.function(item[0])
        columns = {name: pyarrow.array([value], pyarrow.large_binary()) for name, value in result.items()}
        return pyarrow.table({"item": item, **columns})

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Send an error to the command, which ends the job."""
        import ray

        try:
            yield
        except Exception as error:
            ray.get(self.messages.fail.remote(0, plugins.explain_error(error), True))
            raise
