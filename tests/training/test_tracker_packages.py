"""TensorBoard, Weights & Biases and MLflow themselves: what they have stored is what metrics.jsonl says."""

from __future__ import annotations

import json
import socket
import struct
import threading
from pathlib import Path

import pytest

from kontrast.files import read_json

from support.tracked_runs import STEPS, kill_after, logged, pretrain

pytestmark = pytest.mark.integration
ALL = "training.track=['tensorboard', 'wandb', 'mlflow']"
BLOCK, HEADER = 32768, 7


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory) -> Path:
    """A run that was killed between two checkpoints, twice, and evaluated."""
    place, patch = tmp_path_factory.mktemp("tracked"), pytest.MonkeyPatch()
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        patch.delenv(name, raising=False)
    options = [ALL, "evaluation.every=1", "evaluation.k=5", "title=tracked"]
    kill_after(11, place, *options)
    kill_after(17, place, *options, "--resume")
    run, said = pretrain(place, *options, "--resume")
    patch.undo()
    assert "tracker" not in said, said
    assert [step for step, _ in logged(run)] == list(range(2, STEPS + 1, 2)) and "knn" in logged(run)[-1][1]
    return run


def test_tensorboard(killed_and_resumed):
    """It shows each step once, although the steps after a checkpoint were taken twice."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(killed_and_resumed / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("loss", "knn", "epoch"):
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(step, numbers[name]) for step, numbers in logged(killed_and_resumed) if name in numbers]
        assert [step for step, _ in shown] == [step for step, _ in expected]
        assert [value for _, value in shown] == pytest.approx([value for _, value in expected])


def test_weights_and_biases(killed_and_resumed):
    pytest.importorskip("wandb")
    files = list((killed_and_resumed / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1 and read_json(killed_and_resumed / "run.json")["tracker_id"] in files[0].name
    rows, config, summary = offline_content(files[0])
    own = [(row.pop("_step"), {k: v for k, v in row.items() if not k.startswith("_")}) for row in rows]
    assert own == logged(killed_and_resumed)
    assert config["training.max_steps"] == STEPS and config["title"] == "tracked"
    assert summary["best_knn"] == logged(killed_and_resumed)[-1][1]["knn"]


def test_mlflow(killed_and_resumed):
    mlflow = pytest.importorskip("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        client = mlflow.MlflowClient(tracking_uri=(killed_and_resumed / "mlruns").as_uri())
        runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
        assert len(runs) == 1 and runs[0].info.status == "FINISHED" and runs[0].info.run_name == "tracked"
        assert runs[0].data.params["training.max_steps"] == str(STEPS)
        expected = logged(killed_and_resumed)
        for name in {name for _, numbers in expected for name in numbers}:
            points = [(point.step, point.value) for point in client.get_metric_history(runs[0].info.run_id, name)]
            assert sorted(points) == [(step, numbers[name]) for step, numbers in expected if name in numbers]
        assert runs[0].data.metrics["best_knn"] == expected[-1][1]["knn"]


def test_nothing_is_sent_unless_the_user_says_so(tmp_path, monkeypatch):
    """Whoever opens a connection, in Python or in W&B's own program, would have to use this proxy."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    connections: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def accept() -> None:
            while True:
                try:
                    connection, _ = proxy.accept()
                except OSError:
                    return
                connections.append(connection.recv(200).decode("latin-1"))
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, address)
            monkeypatch.setenv(name.lower(), address)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        _, said = pretrain(tmp_path, ALL)
    assert not connections and "tracker" not in said


def offline_content(path: Path) -> tuple[list[dict], dict, dict]:
    """Return the history, the config and the summary in a file of W&B's offline mode, a log of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, config, summary = [], {}, {}
    for data in log_records(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
        elif kind in ("run", "config"):
            updates = (record.run.config if kind == "run" else record.config).update
            config |= {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in updates}
        elif kind == "summary":
            summary |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update}
    return rows, config, summary


def log_records(content: bytes) -> list[bytes]:
    """Return the records of a file in LevelDB's log format, which has a header of 7 bytes."""
    found, place, parts = [], HEADER, []
    while place + HEADER <= len(content):
        if BLOCK - place % BLOCK < HEADER:  # the end of a block is padded
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + HEADER])
        parts.append(content[place + HEADER : place + HEADER + length])
        place += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(b"".join(parts))
            parts = []
    return found
