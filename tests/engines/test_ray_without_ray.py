"""What `--engine ray` does without Ray: errors of the command, messages, and the parts of an embedding."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch

import kontrast
from kontrast.engines.ray_cluster import OwnThread, check_answers, check_engine
from kontrast.engines.ray_messages import Job, Messages, in_thread
from kontrast.engines.ray_ranks import follow
from kontrast.errors import (
    DataError,
    EnvironmentFault,
    KontrastError,
    LostRank,
    NumbersError,
    Stopped,
    UsageError,
)
from kontrast.runs import embed as embed_module
from kontrast.runs.embed import embed, spans
from kontrast.runs.embed_on_ray import parts_on_ray
from kontrast.training import pretrain as pretrain_module
from kontrast.training import signals
from kontrast.training.signals import StopSignals

from support import command_line, tiny_run
from support.command_line import one_line
from support.commands import free_port


def silent(line: str) -> None:
    pass


# Arguments


@pytest.mark.parametrize("arguments, words", [
    (["--engine", "rya"], ["rya", "ray"]),
    (["--workers", "2"], ["--workers 2", "--engine ray", "torchrun"]),
    (["--max-restarts", "2"], ["--max-restarts 2", "--engine ray"]),
    (["--engine", "ray", "--workers", "0"], ["--workers 0", "1 or more"]),
    (["--engine", "ray", "--max-restarts=-1"], ["--max-restarts -1", "0 or more"]),
])  # fmt: skip
def test_wrong_options_are_errors_before_any_work(arguments, words, tmp_path):
    one_line(command_line.kontrast("pretrain", *arguments, "--out", str(tmp_path / "run")), 2, *words)
    assert not (tmp_path / "run").exists()


def test_a_rank_of_torchrun_starts_no_cluster(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not check_engine("local", None)
    with pytest.raises(UsageError, match="torchrun"):
        check_engine("ray", 2)


def test_without_the_extra_the_error_names_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    ray = ["--engine", "ray", "--workers", "2"]
    one_line(command_line.kontrast("pretrain", *ray, "--out", str(tmp_path / "run")), 6, "pip install 'kontrast[ray]'")
    embedding = ["embed", str(tiny_run.trained()), "digits", "--out", str(tmp_path / "v.npy")]
    one_line(command_line.kontrast(*embedding, *ray), 6, "pip install 'kontrast[ray]'")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments, words", [
    (["--out", "{run}"], ["already contains a run", "--resume"]),
    (["--resume", "--out", "{none}"], ["contains no run"]),
    (["--resume"], ["--out is missing"]),
    (["training.epohcs=2", "--out", "{none}"], ["epohcs", "epochs"]),
    (["--recipe", "digits/symclr", "--out", "{none}"], ["symclr", "simclr"]),
])  # fmt: skip
def test_folder_and_recipe_are_checked_before_the_cluster_starts(arguments, words, tmp_path):
    places = {"run": str(tiny_run.trained()), "none": str(tmp_path / "none")}
    given = [argument.format(**places) for argument in arguments]
    one_line(command_line.kontrast("pretrain", "--engine", "ray", *given), 2, *words)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_does_not_see_the_run_is_named(monkeypatch):
    monkeypatch.setattr(pretrain_module.distributed, "gather_texts", lambda text: ["True", "True", "False"])
    with pytest.raises(EnvironmentFault, match="rank 2 does not see the run"):
        pretrain_module.choose_folder(tiny_run.trained(), True, None, None)


def test_a_worker_without_the_folders_of_the_command_says_which(tmp_path):
    with pytest.raises(EnvironmentFault, match=f"does not see {tmp_path / 'gone'}"):
        Job(print, folder=str(tmp_path / "gone")).enter()
    with pytest.raises(EnvironmentFault, match=f"does not see {tmp_path / 'storage'}"):
        Job(print, marker=str(tmp_path / "storage" / "command")).enter()


def test_an_address_at_which_nothing_answers_is_an_error_at_once():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(EnvironmentFault, match=f"no Ray cluster answers at RAY_ADDRESS={address}"):
        check_answers(address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_answers(f"127.0.0.1:{server.getsockname()[1]}")
    check_answers("auto")


# Messages and errors


def received(messages: Messages) -> list[tuple[str, object]]:
    return [messages.waiting.get_nowait() for _ in range(messages.waiting.qsize())]


def test_attempts_are_counted_until_an_error_that_would_come_again():
    async def talk() -> list[object]:
        messages = Messages()
        counted = [await messages.begin()]
        await messages.fail(1, LostRank("rank 0 of 2"), False)
        counted.append(await messages.begin())
        assert not messages.ended.is_set()
        await messages.fail(0, DataError("no images"), True)
        await messages.wait_for_end()
        counted.append(await messages.begin())
        assert [kind for kind, _ in received(messages)] == ["began", "failed", "began", "failed", "began"]
        await messages.stop(signal.SIGTERM)
        return [*counted, await messages.wait_for_stop()]

    assert asyncio.run(talk()) == [0, 1, -1, signal.SIGTERM]


def test_a_thread_is_followed_and_its_error_is_raised():
    assert [event for event in in_thread(lambda send: send(("say", "a")) or 3) if event[0]] == [
        ("say", "a"),
        ("done", 3),
    ]
    with pytest.raises(NumbersError, match="NaN"):
        list(in_thread(lambda send: (_ for _ in ()).throw(NumbersError("NaN"))))


def ended(*events: tuple[str, object], restarts: int = 3, stop: StopSignals | None = None) -> tuple[object, list[str]]:
    """Return the result of a job that sends these events, or its error, and what it says."""
    said: list[str] = []
    try:
        return follow(iter(events), stop or StopSignals(), restarts, lambda: "COMMAND", said.append), said
    except KontrastError as error:
        return error, said


LOST, BAD = (0, LostRank("rank 1 of 2 ended"), False), DataError("no images")


def test_a_job_ends_with_its_result(capsys):
    result, said = ended(("began", 1), ("say", "a line"), ("text", "a bar"), ("result", "run"), ("fit", ""))
    assert (result, said) == ("run", ["a line"])
    assert capsys.readouterr().err == "a bar"


def test_a_restarted_job_says_so_and_forgets_why():
    events = [("began", 1), ("failed", LOST), ("began", 2), ("result", "run"), ("fit", "")]
    assert ended(*events) == ("run", ["a worker failed: restart 1 of 3"])
    error, _ = ended(("began", 1), ("failed", LOST), ("began", 2), ("fit", "it died"))
    assert "it died" in str(error)


def test_an_error_of_the_first_rank_ends_the_job_at_once():
    error, _ = ended(("began", 1), ("failed", (0, BAD, True)), ("never", "read"))
    assert error is BAD


def test_an_error_of_another_rank_waits_for_the_first():
    error, _ = ended(("began", 1), ("failed", (1, BAD, True)), ("began", 2), ("fit", ""))
    assert error is BAD


def test_ranks_that_are_lost_too_often_are_an_error_with_the_command_to_resume():
    error, _ = ended(("began", 1), ("failed", LOST), ("fit", "it died"), restarts=0)
    assert isinstance(error, EnvironmentFault) and "rank 1 of 2 ended" in str(error)
    assert "without --max-restarts" in str(error) and str(error).endswith("Resume with: COMMAND")
    error, _ = ended(("began", 1), ("failed", (0, KontrastError("a mistake"), False)), ("fit", "it died"))
    assert error.exit_code == 1 and str(error) == "a mistake"


def test_a_signal_is_passed_on_once_and_the_ranks_answer():
    told: list[int] = []

    class Stopping:
        class stop:
            remote = told.append

    stop = StopSignals()
    stop.patient = True
    stop._record(signal.SIGTERM, None)
    saved = Stopped("stopped and saved at step 3")
    ticks = [("", None)] * 3
    error, _ = ended(("connected", Stopping), ("began", 1), *ticks, ("failed", (0, saved, True)), stop=stop)
    assert error is saved and told == [signal.SIGTERM]
    error, _ = ended(("connected", Stopping), ("began", 1), *ticks, ("fit", "all were killed"), stop=stop)
    assert isinstance(error, Stopped) and str(error).endswith("resume with: COMMAND")


def test_a_requested_stop_is_seen_as_a_signal(monkeypatch):
    monkeypatch.setattr(signals, "_requested", None)
    stop = StopSignals()
    assert stop.signal is None
    signals.request_stop(signal.SIGINT)
    assert stop.signal == signal.SIGINT and stop.error("step 1", "it").exit_code == 130


def test_what_other_threads_print_goes_to_standard_error(capsys):
    sys.stdout, kept = OwnThread(), sys.stdout
    try:
        print("result")
        list(in_thread(lambda send: print("noise")))
    finally:
        sys.stdout = kept
    found = capsys.readouterr()
    assert (found.out, found.err) == ("result\n", "noise\n")


# Parts


def test_spans_of_missing_parts():
    assert list(spans([0, 1, 4, 6, 7, 8])) == [(0, 2), (4, 5), (6, 9)]
    assert list(spans([])) == []


class Pool:
    """Applies a function as the workers of a cluster would, in this process and in an unusual order."""

    device, threads, cores, workers = "cpu", torch.get_num_threads(), 1, 2

    def __init__(self):
        self.items = []

    def apply(self, make, items):
        function = make()
        for item in reversed(items):
            yield None
            self.items.append(item)
            yield item, function(item)


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of one batch of 32 images."""
    monkeypatch.setattr(embed_module, "BATCHES_PER_PART", 1)
    monkeypatch.setattr("kontrast.runs.image_stream.BATCH", 32)
    monkeypatch.setattr(embed_module, "BATCH", 32)


def through_a_pool(run: Path, out: Path, pool: Pool) -> None:
    """Embed the images of the tiny run as `embed(engine="ray")` does, with another pool."""
    opened, images = embed_module.open_run(run), str(tiny_run.images())
    stream = embed_module.open_stream(opened, images)
    facts = embed_module.dependencies(opened, opened.encoder(), stream, torch.device("cpu"))

    def compute(numbers):
        return parts_on_ray(pool, opened, images, "all", None, facts, numbers)

    embed_module.write_in_parts(opened, stream, out, embed_module.write_embeddings, facts, "it", None, compute, silent)


@pytest.mark.parametrize("suffix", ["npy", pytest.param("parquet", marks=pytest.mark.integration)])
def test_parts_of_workers_are_those_of_one_process(small_parts, tmp_path, suffix):
    alone, shared, pool = tmp_path / f"alone.{suffix}", tmp_path / f"shared.{suffix}", Pool()
    embed(tiny_run.trained(), tiny_run.images(), alone, device="cpu", say=silent)
    through_a_pool(tiny_run.trained(), shared, pool)
    assert pool.items == [7, 6, 5, 4, 3, 2, 1, 0]
    assert shared.read_bytes() == alone.read_bytes()
    if suffix == "npy":
        assert shared.with_suffix(".names.jsonl").read_bytes() == alone.with_suffix(".names.jsonl").read_bytes()


def test_only_missing_parts_are_computed_again(small_parts, tmp_path, monkeypatch):
    whole, broken, pool = tmp_path / "whole.npy", tmp_path / "broken.npy", Pool()
    through_a_pool(tiny_run.trained(), whole, Pool())
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(embed_module, "write_embeddings", lambda *_: (_ for _ in ()).throw(Stopped("at the end")))
        through_a_pool(tiny_run.trained(), broken, Pool())
    (tmp_path / "broken.npy.parts" / "part-000002.npy").unlink()
    (tmp_path / "broken.npy.parts" / "part-000005.json").write_text("{")
    through_a_pool(tiny_run.trained(), broken, pool)
    assert pool.items == [5, 2] and broken.read_bytes() == whole.read_bytes()


def test_workers_with_other_images_are_refused(tmp_path):
    run = embed_module.open_run(tiny_run.trained())
    stream = embed_module.open_stream(run, str(tiny_run.images()))
    facts = embed_module.dependencies(run, run.encoder(), stream, torch.device("cpu")) | {"data": "others"}
    with pytest.raises(DataError, match="another data than the command"):
        list(parts_on_ray(Pool(), run, str(tiny_run.images()), "all", None, facts, [0]))


def test_images_in_memory_can_not_be_sent(tmp_path):
    images = kontrast.data.open_data("digits", "test")
    with pytest.raises(UsageError, match="in memory"):
        embed(tiny_run.trained(), images, tmp_path / "v.npy", engine="ray", workers=2)
