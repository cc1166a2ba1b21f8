"""Interleavings that are tried: each function runs one seed, and raises an error if a promise is broken.

PYTHONPATH=src:tests python -m support.interleavings --seeds 0 2000 [SCENARIO ...]
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kontrast.config.recipe import Recipe, parse_toml, read_recipe
from kontrast.data import ImageSet, open_data
from kontrast.data.feeder import Feeder
from kontrast.data.pack import pack
from kontrast.errors import EnvironmentFault, KontrastError, Stopped, UsageError
from kontrast.training import checkpoints
from kontrast.training.failures import lost_rank
from kontrast.training.loop import Loop
from kontrast.training.pretrain import locked
from kontrast.training.run_folder import RunFolder
from kontrast.training.signals import Cut, Interrupted, StopSignals

from support.made_images import encoded, picture, shard_samples, write_tar
from support.simulation import Killed, LostRank, SimulatedPool, SimulatedRanks, Simulation

TRAINING = ("/training/loop.py", "/training/signals.py", "/training/checkpoints.py", "/kontrast/files.py",
            "/training/run_folder.py", "/training/metrics_log.py", "/training/pretrain.py")  # fmt: skip
STORES = ("/data/store_writer.py", "/data/pack_journal.py", "/data/store.py", "/kontrast/files.py")
RECIPE = """seed = 3
[views]
size = 8
[encoder]
name = "small-conv"
width = 8
[head]
name = "linear"
outputs = 4
[training]
epochs = 2
batch = 4
log_every = 1
warmup = 0.0
[evaluation]
every = 1
[checkpoints]
every = 0.5
keep = 2
"""
STEPS = 6
ROUNDS = 6
"""A run is disturbed in at most this many starts; the last one is left alone."""


# Signals, failures and kills on one or several ranks


def train(ranks: int, seed: int, folder: Path) -> dict[str, int]:
    """Train, with signals, failures and kills at any line of any rank, and resume until the run is finished.

    Whatever happened, all ranks stop at the same step, and the run ends with the same bits as an undisturbed one.
    Returns how often each kind of end occurred.
    """
    expected = reference(ranks)  # also imports what is imported on first use: it must not add points to a seed
    path, draw, ends = (
        folder / "run",
        random.Random(seed),
        dict.fromkeys(("finished", "stopped", "failed", "killed"), 0),
    )
    (path / "checkpoints").mkdir(parents=True)
    (path / "run.json").write_text('{"version": 1}')
    for start in range(ROUNDS):
        undisturbed = start == ROUNDS - 1
        end = _train_once(ranks, draw, path, [] if undisturbed else _events(draw, ranks))
        ends[end] += 1
        leftovers = [p.name for p in (path / "checkpoints").iterdir() if not p.name.startswith("step-")]
        assert end != "finished" or not leftovers, leftovers
        if end == "finished":
            break
    assert end == "finished"
    assert outcome(path) == expected, f"seed {seed}: other bits than an undisturbed run"
    return ends


def interrupt_evaluations(ranks: int, times: int, folder: Path) -> None:
    """Train, with a signal to the first rank in each of the first evaluations, and resume until the run is finished."""
    expected = reference(ranks)
    path, left = folder / "run", times
    (path / "checkpoints").mkdir(parents=True)
    (path / "run.json").write_text('{"version": 1}')

    def interrupt(stop: StopSignals) -> None:
        nonlocal left
        if left:
            left -= 1
            stop._record(signal.SIGTERM, None)

    ends = []
    while not ends or ends[-1] != "finished":
        ends.append(_train_once(ranks, random.Random(len(ends)), path, [], interrupt))
        assert len(ends) <= times + 1, ends
    assert not left and outcome(path) == expected, "other bits than an undisturbed run"


def _events(draw: random.Random, ranks: int) -> list[tuple[int, int, str]]:
    """Return what happens: (rank, number of the point, kind)."""
    kinds = ("SIGTERM", "SIGTERM", "SIGINT", "storage", "error", "kill")
    return [
        (draw.randrange(ranks), draw.randrange(1, 2_500), draw.choice(kinds)) for _ in range(draw.choice((1, 1, 2, 3)))
    ]


def _train_once(
    ranks: int,
    draw: random.Random,
    path: Path,
    events: Sequence[tuple[int, int, str]],
    in_evaluation: Callable[[StopSignals], None] = lambda _: None,
) -> str:
    """Start or resume the run with these events, check how it ended, and say how."""
    simulation = Simulation(draw.randrange(2**32), TRAINING if events or ranks > 1 else (), switching=0.02)
    world = SimulatedRanks(simulation, ranks)
    signals = [StopSignals() for _ in range(ranks)]
    for rank in range(ranks):
        work = functools.partial(_one_rank, path, signals[rank], world, in_evaluation)
        world.tasks.append(simulation.add(f"rank {rank}", work))
    for rank, point, kind in events:
        task = world.tasks[rank]
        if kind == "kill":
            task.events[point] = functools.partial(simulation.kill, task)
        elif kind in ("SIGTERM", "SIGINT"):
            task.events[point] = functools.partial(signals[rank]._record, getattr(signal, kind), None)
        else:
            task.events[point] = functools.partial(_fail, kind, task)
    with _simulated_distributed(world if ranks > 1 else None):
        simulation.run()
    return _how_it_ended(simulation, signals)


def _fail(kind: str, task: Any) -> None:
    """Fail as own code of the user does, or storage, while a batch is read: between two steps."""
    task.fault = EnvironmentFault("storage gone?") if kind == "storage" else ValueError("own code is wrong")


def _how_it_ended(simulation: Simulation, signals: list[StopSignals]) -> str:
    errors = [task.error for task in simulation.tasks]
    for error in errors:
        if error is not None and not isinstance(error, KontrastError | Killed | LostRank | Cut | ValueError):
            raise error
    if any(isinstance(error, Cut) and not stop.patient for error, stop in zip(errors, signals)):
        return "stopped"  # before training: `StopSignals` says that the same command has to be run again
    if any(isinstance(error, Killed) for error in errors):
        return "killed"
    if any(isinstance(error, EnvironmentFault | LostRank | ValueError) for error in errors):
        return "failed"
    if any(isinstance(error, Stopped | Interrupted) for error in errors):
        assert all(isinstance(error, Stopped | Interrupted) for error in errors), f"not all ranks stopped: {errors}"
        assert any(stop.signal is not None for stop in signals)
        assert len({str(error).split(";")[0] for error in errors}) == 1, f"ranks stopped at different steps: {errors}"
        return "stopped"
    assert errors == [None] * len(errors), errors
    return "finished"


def _one_rank(
    path: Path, stop: StopSignals, world: SimulatedRanks, in_evaluation: Callable[[StopSignals], None]
) -> None:
    """One rank of a run, as `Pretraining.run` starts it."""
    folder, main = RunFolder(path), world.get_rank() == 0
    with locked(folder):
        loop = Loop(recipe(), folder, images(), torch.device("cpu"), lambda _: None)
        loop.restore()
        stop.patient = True
        loop.feeder.batches = functools.partial(_batches, loop.feeder.batches, world.simulation)  # type: ignore
        try:
            loop.run(functools.partial(evaluate, stop, in_evaluation) if main else None, stop, "resume")
        except RuntimeError as error:
            if (fault := lost_rank(error)) is not None:
                assert "rank" in str(fault)
                raise fault from None
            raise


def _batches(batches: Callable[..., Any], simulation: Simulation, *arguments: Any, **options: Any) -> Iterator[Any]:
    for batch in batches(*arguments, **options):
        if fault := getattr(simulation.current, "fault", None):
            simulation.current.fault = None  # type: ignore[union-attr]
            raise fault
        yield batch


def evaluate(
    stop: StopSignals, in_evaluation: Callable[[StopSignals], None], network: torch.nn.Module
) -> dict[str, float]:
    """Measure something that depends on every weight."""
    in_evaluation(stop)
    total = sum(float(p.detach().double().abs().sum()) for p in network.parameters())
    return {"effective_rank": 3.0, "knn": total % 1}


@contextlib.contextmanager
def _simulated_distributed(world: SimulatedRanks | None) -> Iterator[None]:
    if world is None:
        yield
        return
    with (
        mock.patch("kontrast.distributed.dist", world),
        mock.patch("kontrast.training.step.data_parallel", world.data_parallel),
    ):
        yield


@functools.cache
def recipe() -> Recipe:
    return read_recipe(parse_toml(RECIPE, "tiny"), "tiny")


@functools.cache
def images() -> ImageSet:
    pixels = torch.randint(0, 256, (13, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageSet(pixels, [f"{i}.png" for i in range(13)])


def outcome(path: Path) -> tuple[str, str]:
    """Return the digests of the last checkpoint's tensors and state, and of the metrics."""
    last = checkpoints.checkpoints(path / "checkpoints")[-1]
    assert last.name == f"step-{STEPS:08d}", last
    parts = [(last / name).read_bytes() for name in checkpoints.FILES]
    state = {key: value for key, value in json.loads(parts[1]).items() if key != "failures"}
    metrics = (path / "metrics.jsonl").read_bytes()
    return hashlib.sha256(parts[0] + json.dumps(state).encode()).hexdigest(), hashlib.sha256(metrics).hexdigest()


@functools.cache
def reference(ranks: int) -> tuple[str, str]:
    """Return the outcome of an undisturbed run."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        (path / "checkpoints").mkdir()
        (path / "run.json").write_text('{"version": 1}')
        assert _train_once(ranks, random.Random(0), path, []) == "finished"
        return outcome(path)


# Two processes on one run folder


def share_run_folder(seed: int, folder: Path) -> dict[str, int]:
    """Three processes want one run folder; some of them fail before their run begins, and one may be killed.

    Never are two of them inside, and what the one inside wrote stays.
    """
    simulation = Simulation(seed, ("/training/run_folder.py", "/kontrast/files.py", "/training/pretrain.py"), 0.3)
    inside: list[str] = []
    counts = {"began": 0, "gave up": 0, "refused": 0, "killed": 0}

    def work(name: str, wrong: bool) -> None:
        run = RunFolder(folder / "runs" / "one")
        try:
            run.create()
            with locked(run):
                begin(name, run, wrong)
        except UsageError as error:
            counts["gave up" if "wrong recipe" in str(error) else "refused"] += 1
        except EnvironmentFault:
            counts["refused"] += 1

    def begin(name: str, run: RunFolder, wrong: bool) -> None:
        inside.append(name)
        assert inside == [name], f"{inside} are inside at once"
        assert not run.holds_run, "a new run began in the folder of another run"
        for step in ("run.json", "images/store"):
            (run / step).parent.mkdir(exist_ok=True)
            (run / step).write_text(name)
            simulation.point()
        for step in ("run.json", "images/store"):
            assert (run / step).read_text() == name, f"another process changed {step}"
        if wrong:
            inside.remove(name)
            raise UsageError("wrong recipe")
        (run / "recipe.toml").write_text(name)
        counts["began"] += 1
        inside.remove(name)

    draw = random.Random(seed)
    for number in range(3):
        name = f"process {number}"
        simulation.add(name, functools.partial(work, name, draw.random() < 0.6))
    victim = draw.choice(simulation.tasks)

    def kill() -> None:
        if victim.name in inside:
            inside.remove(victim.name)
        simulation.kill(victim)

    if draw.random() < 0.3:
        victim.events[draw.randrange(1, 120)] = kill
    simulation.run()
    for task in simulation.tasks:
        counts["killed"] += isinstance(task.error, Killed)
        if task.error is not None and not isinstance(task.error, Killed):
            raise task.error
    if counts["began"]:
        assert counts["began"] == 1
        owner = (folder / "runs" / "one" / "recipe.toml").read_text()
        assert (folder / "runs" / "one" / "run.json").read_text() == owner
    else:  # nothing that is left hinders a new run
        run = RunFolder(folder / "runs" / "one")
        run.create()
        with locked(run):
            pass
    return counts


# Several processes that pack the same images


def pack_together(seed: int, folder: Path) -> dict[str, int]:
    """Two processes pack the same folder into one store, one may be killed, and a third opens it when it is there.

    The store is complete or absent at every moment, and in the end has the bytes of an undisturbed packing.
    """
    expected = packed_photos()
    shutil.copytree(photos(), folder / "photos", copy_function=shutil.copy2)
    simulation, draw = Simulation(seed, STORES, 0.05), random.Random(seed)
    spec, store = str(folder / "photos"), folder / "store"
    tasks = [simulation.add(f"pack {n}", lambda: pack(spec, store, workers=1)) for n in range(2)]
    simulation.add("read", functools.partial(_read_when_there, simulation, store))
    killed = draw.random() < 0.6
    if killed:
        tasks[0].events[draw.randrange(1, 700)] = functools.partial(simulation.kill, tasks[0])
    with mock.patch("kontrast.data.store_writer.CHUNK", 2):
        simulation.run()
        errors = [task.error for task in simulation.tasks if task.error is not None]
        for error in errors:
            if not isinstance(error, Killed):
                raise error
        pack(spec, store, workers=1)
    assert not list(folder.glob("store/*.part")) and not list(folder.glob("store/*.replaced"))
    assert store_digest(store / "train") == expected, f"seed {seed}: other bytes"
    return {"packed": 1, "killed": len(errors)}


def _read_when_there(simulation: Simulation, store: Path) -> None:
    for _ in range(30):
        simulation.point()
        if (store / "train" / "store.json").exists():
            assert len(open_data(store)) == 5
            return


@functools.cache
def photos() -> Path:
    place = Path(tempfile.mkdtemp(prefix="kontrast-interleavings-"))
    for number in range(5):
        (place / f"{number}.png").write_bytes(encoded(picture(number, 2), "PNG"))
    return place


def store_digest(split: Path) -> str:
    names = ("images.u8", "sizes.i64", "names.json")
    return hashlib.sha256(b"".join((split / name).read_bytes() for name in names)).hexdigest()


@functools.cache
def packed_photos() -> str:
    with tempfile.TemporaryDirectory() as place:
        pack(str(photos()), Path(place) / "store", workers=1)
        return store_digest(Path(place) / "store" / "train")


# The feeder and the decoding workers


def feed(seed: int, folder: Path) -> dict[str, int]:
    """Batches of images that workers decode ahead are the same, in whatever order the workers finish.

    Some images are damaged; in some seeds a worker is lost, and in some the consumer stops early.
    """
    whole, shard, draw = fed(), folder / "set.tar", random.Random(seed)
    shutil.copy2(shards(), shard)
    lost = draw.randrange(1, 40) if draw.random() < 0.4 else 0
    early = draw.randrange(1, 9) if draw.random() < 0.3 else 0
    pool, batches = SimulatedPool.of(seed), []
    with mock.patch("kontrast.data.feeder.ThreadPoolExecutor", pool), _simulated_workers(pool, lost):
        data = open_data(str(shard), "all", pack=False, max_bad=1.0, workers=3)
        feeder = Feeder(data, 4, seed=1)
        try:
            for epoch in range(2):
                for batch in feeder.batches(epoch, start=1):
                    batches.append((epoch, batch.step, batch.indices.tolist(), int(batch.images.long().sum())))
                    if len(batches) == early:
                        break
            ended = "all"
        except EnvironmentFault as error:
            assert "decoding process" in str(error)
            ended = "lost"
    left_out = early and whole[early - 1][0]  # the epoch that the consumer left
    expected = [b for n, b in enumerate(whole) if not early or n < early or b[0] > left_out]
    assert batches == expected[: len(batches)], f"seed {seed}: other batches"
    assert ended == "lost" or len(batches) == len(expected)
    assert not [future for future in pool.waiting if future.pool.workers != 3], "work is left in the feeder's pool"
    return {ended: 1, "early": bool(early)}


@contextlib.contextmanager
def _simulated_workers(pool: type[SimulatedPool], lost: int) -> Iterator[None]:
    """Decode in this process, in the pool's order; the piece number `lost` loses its worker."""
    from kontrast.data import decode_workers

    count = 0

    def work(self: Any, items: Sequence[Any]) -> Any:
        nonlocal count
        count += 1
        if count == lost:
            raise EnvironmentFault("a decoding process was killed by signal 9")
        return decode_workers.decode_chunk(items, self.limits)

    with (
        mock.patch("kontrast.data.decode_workers.ThreadPoolExecutor", pool),
        mock.patch("kontrast.data.decode_workers.Decoders._work", work),
    ):
        yield


@functools.cache
def shards() -> Path:
    place = Path(tempfile.mkdtemp(prefix="kontrast-interleavings-"))
    members = shard_samples(0, 26)
    damaged = [
        (name, content[:40] if name in ("00003.png", "00011.png", "00012.png") else content)
        for name, content in members
    ]
    return write_tar(place / "set.tar", damaged)


@functools.cache
def fed() -> list[tuple[int, int, list[int], int]]:
    """Return the batches that one process without workers reads."""
    data = open_data(str(shards()), "all", pack=False, max_bad=1.0, workers=1)
    feeder = Feeder(data, 4, seed=1)
    found = [(epoch, batch) for epoch in range(2) for batch in feeder.batches(epoch, start=1)]
    return [(epoch, b.step, b.indices.tolist(), int(b.images.long().sum())) for epoch, b in found]


SCENARIOS: dict[str, Callable[[int, Path], dict[str, int]]] = {
    "one process": functools.partial(train, 1),
    "two ranks": functools.partial(train, 2),
    "three on a run folder": share_run_folder,
    "packing together": pack_together,
    "feeding": feed,
}


def try_seed(scenario: str, seed: int) -> dict[str, int]:
    """Run one seed of a scenario in a temporary folder."""
    with tempfile.TemporaryDirectory() as place, mock.patch.dict("os.environ", KONTRAST_CACHE=f"{place}/cache"):
        return SCENARIOS[scenario](seed, Path(place))


def main() -> None:
    import argparse
    import platform
    import time
    import traceback
    from collections import Counter
    from datetime import UTC, datetime

    parser = argparse.ArgumentParser()
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 100))
    parser.add_argument("--minutes", type=float, default=1e9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for scenario in given.scenarios:
        counts: Counter[str] = Counter()
        failed, begin = [], time.monotonic()
        for seed in range(*given.seeds):
            if time.monotonic() - begin > 60 * given.minutes:
                break
            counts["seeds"] += 1
            try:
                counts.update(try_seed(scenario, seed))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed.append(seed)
                print(f"{scenario}, seed {seed}: {''.join(traceback.format_exception(error))}", flush=True)
        minutes = round((time.monotonic() - begin) / 60, 1)
        line = {"scenario": scenario, **counts, "failing_seeds": failed, "minutes": minutes,
                "python": platform.python_version(), "torch": torch.__version__,
                "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M")}  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
