"""The scripts for SLURM and Kubernetes run: with a stand-in for torchrun, and (slow) with torchrun on two "nodes"."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from support.command_line import TINY
from support.commands import free_port

EXAMPLES = Path(__file__).parents[1] / "examples"
SLURM, KUBERNETES = EXAMPLES / "slurm.sh", EXAMPLES / "kubernetes.yaml"
SCONTROL = """#!/bin/sh
case $1 in
  show) for node in a b; do echo localhost; done ;;
  requeue) echo "$2" >> "$PLACE/requeued" ;;
esac
"""
SRUN = """#!/bin/bash
# Start the command once per node, and pass on signals, as srun does.
shift  # --kill-on-bad-exit=1
ranks=()
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & ranks+=($!); done
trap 'kill -TERM "${ranks[@]}"' TERM
code=0
for rank in "${ranks[@]}"; do
  while kill -0 $rank 2>/dev/null; do wait $rank; ended=$?; done
  [ $ended = 0 ] || code=$ended
done
exit $code
"""
TORCHRUN = """#!/bin/bash
# Record the arguments, and train until a signal arrives if PLACE/train exists.
echo "$@" >> "$PLACE/torchrun"
trap 'exit 1' TERM
while [ -e "$PLACE/train" ]; do sleep 0.05; done
exit ${CODE:-0}
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """The environment of a job on two nodes, with stand-ins for srun, scontrol and torchrun in `tmp_path`/bin."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": TORCHRUN}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "1234", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS_ON_NODE": "8"}
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **job, "PATH": path, "PLACE": str(tmp_path)}


def slurm(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["bash", str(SLURM), *arguments], env=environment, stderr=subprocess.PIPE, text=True)


def calls(place: Path) -> list[str]:
    path = place / "torchrun"
    return path.read_text().splitlines() if path.exists() else []


def test_slurm_starts_one_torchrun_per_node(environment, tmp_path):
    assert slurm(environment, str(tmp_path / "run"), "photos", "training.batch=64").wait() == 0
    first, second = calls(tmp_path)
    assert first == second
    for words in (
        "--nnodes 2 --nproc-per-node 8 --max-restarts 3", "--rdzv-backend c10d --rdzv-endpoint localhost:21234",
        f"-m kontrast pretrain --out {tmp_path / 'run'} photos training.batch=64",
    ):  # fmt: skip
        assert words in first


def test_slurm_resumes_a_run_that_has_begun(environment, tmp_path):
    (tmp_path / "recipe.toml").touch()
    assert slurm(environment, str(tmp_path), "photos").wait() == 0
    assert all(call.endswith(f"pretrain --out {tmp_path} --resume photos") for call in calls(tmp_path))


@pytest.mark.parametrize("number, requeued", [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_slurm_stops_on_signals_and_queues_the_job_again(environment, tmp_path, number, requeued):
    (tmp_path / "train").touch()
    job = slurm(environment, str(tmp_path / "run"))
    while len(calls(tmp_path)) < 2:
        time.sleep(0.01)
    job.send_signal(number)
    assert job.wait() == 75
    assert (tmp_path / "requeued").exists() == requeued
    assert not requeued or (tmp_path / "requeued").read_text() == "1234\n"


def test_slurm_reports_a_failure_and_a_missing_folder(environment, tmp_path):
    assert slurm({**environment, "CODE": "3"}, str(tmp_path / "run")).wait() == 3
    assert not (tmp_path / "requeued").exists()
    job = slurm(environment)
    assert job.wait() != 0 and "give the run folder" in job.stderr.read()


def directives() -> dict[str, str]:
    """Return the #SBATCH options."""
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SLURM.read_text(), re.MULTILINE)
    return dict(lines)


def test_slurm_asks_for_what_the_script_relies_on():
    asked = directives()
    assert asked["ntasks-per-node"] == "1" and asked["signal"].startswith("B:USR1@") and "requeue" in asked


def container_command() -> str:
    """Return the script in the manifest: the literal block below `args`."""
    block = re.search(r"args:\n +- \|\n((?: {14}.*\n)+)", KUBERNETES.read_text())[1]
    return textwrap.dedent(block)


def pod(environment: dict[str, str], index: int, **variables: str) -> subprocess.Popen[bytes]:
    """Run the container's command with the variables that an indexed Job and the manifest set."""
    own = {"JOB_COMPLETION_INDEX": str(index), "NODES": "2", "GPUS": "8", "FIRST_NODE": "localhost:29500"} | variables
    return subprocess.Popen(
        ["bash", "-c", container_command()], env=environment | own, stderr=subprocess.PIPE, text=True
    )


def test_kubernetes_starts_torchrun_in_each_pod(environment, tmp_path):
    for index in range(2):
        assert pod(environment, index, OUT=str(tmp_path / "run")).wait() == 0
    first, second = calls(tmp_path)
    assert "--nnodes 2 --nproc-per-node 8" in first and "--rdzv-endpoint localhost:29500" in first
    assert "is_host=true" in first and "is_host=false" in second
    assert first.endswith(f"-m kontrast pretrain --out {tmp_path / 'run'} /training/photos training.batch=4096")
    (tmp_path / "recipe.toml").touch()
    assert pod(environment, 0, OUT=str(tmp_path)).wait() == 0
    assert "pretrain --resume --out" in calls(tmp_path)[-1]


def test_the_manifest_is_an_indexed_job():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    spec = job["spec"]
    container = spec["template"]["spec"]["containers"][0]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert job["kind"] == "Job" and spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(variables["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == variables["GPUS"]
    assert container["command"] == ["bash", "-c"] and container["args"] == [container_command()]
    assert (
        service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    )
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}:"
    assert variables["FIRST_NODE"].startswith(host) and spec["template"]["spec"]["restartPolicy"] == "Never"


# With torchrun


OPTIONS = [*TINY, "training.max_steps=2", "--device", "cpu", "--no-probes"]


@pytest.fixture
def two_nodes(environment, tmp_path) -> dict[str, str]:
    """The environment of a job on two "nodes" of this machine, one rank each, with the real torchrun."""
    (tmp_path / "bin" / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    return environment | {"SLURM_GPUS_ON_NODE": "1", "PORT": str(free_port()), "OMP_NUM_THREADS": "1"}


def digest(run: Path) -> str:
    return hashlib.sha256((run / "encoder.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_both_scripts_train_on_two_nodes_to_the_same_weights(two_nodes, tmp_path):
    job = slurm(two_nodes, str(tmp_path / "slurm"), *OPTIONS)
    assert job.wait() == 0, job.stderr.read()
    port, command = free_port(), container_command()
    assert "/training/photos training.batch=4096" in command
    script = command.replace("/training/photos training.batch=4096", " ".join(["digits", *OPTIONS]))
    own = {"NODES": "2", "GPUS": "1", "FIRST_NODE": f"localhost:{port}", "OUT": str(tmp_path / "pods")}
    pods = [
        subprocess.Popen(["bash", "-c", script], env=two_nodes | own | {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(2)
    ]
    assert [one.wait() for one in pods] == [0, 0]
    for run in ("slurm", "pods"):
        assert json.loads((tmp_path / run / "run.json").read_text())["world"] == 2
    assert digest(tmp_path / "slurm") == digest(tmp_path / "pods")


@pytest.mark.slow
def test_slurm_stops_a_run_that_the_next_job_resumes(two_nodes, tmp_path):
    """SIGUSR1 stops both nodes after a step; the requeued job ends with the weights of an undisturbed one."""
    options = [*OPTIONS, "training.log_every=1", "training.max_steps=300"]
    run = tmp_path / "run"
    job = slurm(two_nodes, str(run), *options)
    while job.poll() is None and not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait() == 75, job.stderr.read()
    assert (tmp_path / "requeued").exists() and not (run / "encoder.safetensors").exists()
    assert list((run / "checkpoints").glob("step-*"))
    assert slurm(two_nodes, str(run), *options).wait() == 0
    shutil.move(run, tmp_path / "resumed")
    assert slurm(two_nodes, str(run), *options).wait() == 0
    assert digest(run) == digest(tmp_path / "resumed")
