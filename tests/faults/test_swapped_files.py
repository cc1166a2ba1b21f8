"""Files of a run that were lost, swapped with another run's or changed: named and refused, never used."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kontrast.cli import main as cli
from kontrast.runs.run import Run
from kontrast.training.pretrain import default_out

from support import tiny_run
from support.command_line import kontrast, one_line
from support.commands import TINY, Command, resumed_step, until

PLAIN = [*TINY, "training.max_steps=6", "training.log_every=1", "checkpoints.keep=3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Train a run that tests copy."""
    place = tmp_path_factory.mktemp("finished")
    Command(place / "log", *PLAIN, "--out", str(place / "run")).ended(0)
    return place / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def edited(path: Path, **facts) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.mark.fault(4)
def test_checkpoint_of_another_run(run, tmp_path):
    """Exit 4 names it; the run's encoder is unchanged."""
    before = (run / "encoder.safetensors").read_bytes()
    other = tmp_path / "other"
    Command(tmp_path / "log", *PLAIN, "objective.name=dcl", "seed=7", "--out", str(other)).ended(0)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(4)
    assert re.search("step-00000006.*another recipe", said)
    assert (run / "encoder.safetensors").read_bytes() == before


@pytest.mark.fault(4)
def test_checkpoint_under_another_step(run, tmp_path):
    """It is skipped, with both steps, and the run resumes from an older one."""
    steps = sorted((run / "checkpoints").glob("step-*"))
    shutil.rmtree(steps[-1])
    shutil.copytree(steps[-2], steps[-1])
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert re.search("step-00000006.*step 4", said) and resumed_step(said) == 4


@pytest.mark.fault(4)
def test_lost_checkpoints_do_not_start_over(run, tmp_path):
    """Exit 4; metrics and encoder are unchanged."""
    shutil.rmtree(run / "checkpoints")
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "encoder.safetensors")}
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(4)
    assert "step 4" in said
    assert all((run / name).read_bytes() == content for name, content in before.items())


@pytest.mark.fault(33)
def test_flipped_bit_in_the_encoder(tmp_path):
    """Exit 4 from every command that reads it, although the numbers are finite and the shapes right."""
    place = tiny_run.copy(tmp_path)
    weights = place / "encoder.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4] ^= 1
    weights.write_bytes(bytes(content))
    one_line(kontrast("probe", str(place), "knn", "--device", "cpu"), 4, "encoder.safetensors", "encoder_sha256")
    one_line(kontrast("export", str(place), "--out", str(tmp_path / "x.safetensors")), 4, "encoder.safetensors")
    facts = json.loads((place / "run.json").read_text())
    facts.pop("encoder_sha256")
    (place / "run.json").write_text(json.dumps(facts))
    Run(place).encoder()


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    "facts", [{"data": None}, {"data": "photos"}, {"resumed": 3}, {"version": "1"}, {"seconds": "long"}]
)
def test_run_json_with_entries_of_wrong_types(run, tmp_path, facts):
    """Exit 4 with the entry's name."""
    edited(run / "run.json", **facts)
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(4)
    assert "run.json" in said and next(iter(facts)) in said


@pytest.mark.fault(34)
@pytest.mark.parametrize("content", ["[]", "null", '{"probes": [1]}', '{"probes": {}}'])
def test_probes_json_with_another_structure(tmp_path, content):
    """Exit 4, and the file is unchanged."""
    place = tiny_run.copy(tmp_path)
    (place / "probes.json").write_text(content)
    one_line(kontrast("probe", str(place), "knn", "--device", "cpu"), 4, "probes.json")
    one_line(kontrast("export", str(place), "--out", str(tmp_path / "x.safetensors")), 4, "probes.json")
    assert (place / "probes.json").read_text() == content


@pytest.mark.fault(34)
def test_metrics_whose_step_is_not_a_number(run, tmp_path):
    """Such lines are skipped, and the run resumes."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": null, "loss": 1.0}\n{"step": "3", "loss": 1.0}\n')
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert all(isinstance(json.loads(line)["step"], int) for line in (run / "metrics.jsonl").read_text().splitlines())


def test_default_run_folder(tmp_path, monkeypatch):
    (tmp_path / "photos" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "photos" / "inner")
    assert default_out(None, "..") == default_out(None, "../") == "runs/photos"
    assert default_out(None, ".") == "runs/inner" and default_out(None, "/") == "runs/folder"
    assert default_out(None, "digits") == "runs/quickstart" and default_out("cifar10/dcl", "x") == "runs/cifar10-dcl"


@pytest.mark.fault(40)
def test_standard_output_is_full():
    """Exit 6 and one line."""
    command = f"{sys.executable} -m kontrast recipes > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 6 and "No space left" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.fault(27)
def test_incomplete_rank_variables(tmp_path):
    """Exit 6 mentions torchrun; there is no folder."""
    variables = {"WORLD_SIZE": "2"}
    said = Command(tmp_path / "log", *TINY, "--out", str(tmp_path / "run"), environment=variables).ended(6)
    assert "torchrun" in said and not (tmp_path / "run").exists()


@pytest.mark.fault(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signal_during_pack(tmp_path, number, code):
    """Exit 75 or 130, as for training."""

    def pack_forever() -> int:
        def wait(*_, **__):
            (tmp_path / "waiting").touch()
            signal.pause()
            raise RuntimeError("not stopped")

        importlib.import_module("kontrast.data.pack").pack = wait
        return cli.run(["pack", "digits", str(tmp_path / "store")])

    command = Command(tmp_path / "log", instead=pack_forever)
    until(lambda: (tmp_path / "waiting").exists())
    command.send(number)
    assert "same command" in command.ended(code)


@pytest.mark.fault(2)
def test_command_to_continue_embed(tmp_path):
    """It has every option that decides the vectors."""
    from kontrast.runs.embed import resume_command
    from kontrast.runs.image_stream import open_stream

    run = Run(tiny_run.trained())
    stream = open_stream(run, str(tiny_run.images()))
    said = resume_command(run, stream, tmp_path / "v.npy", "test", 0.2, "cpu")
    assert re.search(r"--out \S+v.npy --split test --max-bad 0.2 --device cpu$", said)
    assert resume_command(run, stream, tmp_path / "v.npy", "all", None, "auto").endswith("v.npy")
