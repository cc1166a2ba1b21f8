"""Files of a run that were lost, swapped for another run's or changed shape: named and refused, never gone on with."""

from __future__ import annotations

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
from support.commands import TINY, Command, until

PLAIN = [*TINY, "training.max_steps=6", "training.log_every=1", "checkpoints.keep=3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that ended well; tests copy it."""
    place = tmp_path_factory.mktemp("finished")
    Command(place / "log", *PLAIN, "--out", str(place / "run")).ended(0)
    return place / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def edited(path: Path, **facts) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.mark.fault(4)
def test_a_checkpoint_of_a_run_by_another_recipe(run, tmp_path):
    """Exit 4 with its name; the encoder stays the run's own."""
    before = (run / "encoder.safetensors").read_bytes()
    other = tmp_path / "other"
    Command(tmp_path / "log", *PLAIN, "objective.name=dcl", "seed=7", "--out", str(other)).ended(0)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(4)
    assert "checkpoint step-00000006: it belongs to another recipe" in said
    assert (run / "encoder.safetensors").read_bytes() == before


@pytest.mark.fault(4)
def test_a_checkpoint_under_another_steps_name(run, tmp_path):
    """It is skipped with both steps, and the run goes on from one that is what it says."""
    steps = sorted((run / "checkpoints").glob("step-*"))
    shutil.rmtree(steps[-1])
    shutil.copytree(steps[-2], steps[-1])
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert "skipped checkpoint step-00000006: it belongs to step 4" in said and "from step 4 of 6" in said


@pytest.mark.fault(4)
def test_lost_checkpoints_do_not_start_the_run_afresh(run, tmp_path):
    """Exit 4, and what was logged and learned is as it was."""
    shutil.rmtree(run / "checkpoints")
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "encoder.safetensors")}
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(4)
    assert "are gone, though it saved step 4" in said
    assert all((run / name).read_bytes() == content for name, content in before.items())


@pytest.mark.fault(33)
def test_a_flipped_bit_of_the_encoder(tmp_path):
    """Finite numbers of the right shape, and yet not the run's: exit 4 from every command that reads them."""
    place = tiny_run.copy(tmp_path)
    weights = place / "encoder.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4] ^= 1
    weights.write_bytes(bytes(content))
    one_line(kontrast("probe", str(place), "knn", "--device", "cpu"), 4, "SHA-256 differs", "encoder_sha256")
    one_line(kontrast("export", str(place), "--out", str(tmp_path / "x.safetensors")), 4, "SHA-256 differs")
    facts = json.loads((place / "run.json").read_text())
    facts.pop("encoder_sha256")
    (place / "run.json").write_text(json.dumps(facts))
    Run(place).encoder()


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    "facts", [{"data": None}, {"data": "photos"}, {"resumed": 3}, {"version": "1"}, {"seconds": "long"}]
)
def test_run_json_with_entries_of_another_kind(run, tmp_path, facts):
    """Exit 4 with the entry's name."""
    edited(run / "run.json", **facts)
    said = Command(tmp_path / "log", "--resume", "--out", str(run)).ended(4)
    assert "run.json" in said and next(iter(facts)) in said


@pytest.mark.fault(34)
@pytest.mark.parametrize("content", ["[]", "null", '{"probes": [1]}', '{"probes": {}}'])
def test_probes_json_of_another_shape(tmp_path, content):
    """Exit 4, and the file is as it was."""
    place = tiny_run.copy(tmp_path)
    (place / "probes.json").write_text(content)
    one_line(kontrast("probe", str(place), "knn", "--device", "cpu"), 4, "probes.json", "no list of probes")
    one_line(kontrast("export", str(place), "--out", str(tmp_path / "x.safetensors")), 4, "probes.json")
    assert (place / "probes.json").read_text() == content


@pytest.mark.fault(34)
def test_metrics_whose_step_is_no_number(run, tmp_path):
    """Such lines are left out, and the run goes on."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": null, "loss": 1.0}\n{"step": "3", "loss": 1.0}\n')
    Command(tmp_path / "log", "--resume", "--out", str(run)).ended(0)
    assert all(isinstance(json.loads(line)["step"], int) for line in (run / "metrics.jsonl").read_text().splitlines())


def test_a_run_is_named_by_the_folder_that_a_path_means(tmp_path, monkeypatch):
    (tmp_path / "photos" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "photos" / "inner")
    assert default_out(None, "..") == default_out(None, "../") == "runs/photos"
    assert default_out(None, ".") == "runs/inner" and default_out(None, "/") == "runs/folder"
    assert default_out(None, "digits") == "runs/quickstart" and default_out("cifar10/dcl", "x") == "runs/cifar10-dcl"


@pytest.mark.fault(40)
def test_standard_output_is_full():
    """Exit 6 in one line."""
    command = f"{sys.executable} -m kontrast recipes > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 6 and "No space left" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.fault(27)
def test_half_of_the_variables_of_ranks(tmp_path):
    """Exit 6 with what to do, and no folder."""
    variables = {"WORLD_SIZE": "2"}
    said = Command(tmp_path / "log", *TINY, "--out", str(tmp_path / "run"), environment=variables).ended(6)
    assert "can't join the ranks" in said and "torchrun" in said and not (tmp_path / "run").exists()


@pytest.mark.fault(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_a_command_without_a_loop_of_its_own(tmp_path, monkeypatch, number, code):
    """Also `pack` and `lens` end with the promised code and a line that says what to do."""

    def packing() -> int:
        import kontrast.data

        def waiting(*_, **__):
            (tmp_path / "waiting").touch()
            signal.pause()
            raise RuntimeError("not stopped")

        kontrast.data.pack = waiting
        return cli.run(["pack", "digits", str(tmp_path / "store")])

    command = Command(tmp_path / "log", instead=packing)
    until(lambda: (tmp_path / "waiting").exists())
    command.send(number)
    assert "stopped; give the same command again" in command.ended(code)


@pytest.mark.fault(2)
def test_a_stopped_embedding_says_all_of_its_command(tmp_path):
    """What it says goes on with the same vectors."""
    from kontrast.runs.embed import go_on
    from kontrast.runs.image_stream import open_stream

    run = Run(tiny_run.trained())
    stream = open_stream(run, str(tiny_run.images()))
    said = go_on(run, stream, tmp_path / "v.npy", "test", 0.2, "cpu")
    assert re.search(r"--out \S+v.npy --split test --max-bad 0.2 --device cpu$", said)
    assert go_on(run, stream, tmp_path / "v.npy", "all", None, "auto").endswith("v.npy")
