"""The command `kontrast reproduce` with a tiny table: run, killed, resumed, and run with two jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kontrast.cli.main import run
from kontrast.papers.result_pages import markdown
from kontrast.papers.tables import load_table

from support.tiny_run import images

TABLE = """
title    = "A tiny table"
paper    = "nobody"
about    = "Digits."
probes   = ["linear", "knn"]
measures = ["multiplier", "positives"]
settings = [
    "data.source=SOURCE", "training.epochs=EPOCHS", "training.batch=32", "training.warmup=0.0", "encoder.width=8",
    "evaluation.every=1", "evaluation.gallery=0", "checkpoints.every=1.0",
]

[[groups]]
name  = "losses"
title = "Losses"
where = "figure 0"
cells = [
    { name = "nt", label = "NT-Xent", recipe = "quickstart", paper = 12.5 },
    { name = "dcl", label = "DCL", recipe = "digits/dcl" },
]
"""


@pytest.fixture
def tiny(tmp_path):
    """A function that writes a table on 240 digits and returns the command that runs it in its own folders."""

    def made(epochs: int = 2, place: str = "") -> list[str]:
        text = TABLE.replace("SOURCE", str(images())).replace("EPOCHS", str(epochs))
        (tmp_path / "tiny.toml").write_text(text)
        folder = tmp_path / place
        words = [str(tmp_path / "tiny.toml"), "--out", str(folder / "results"), "--runs", str(folder / "runs")]
        return ["reproduce", *words, "--device", "cpu"]

    return made


def stored(path: Path) -> dict[tuple[str, int], dict]:
    tree = json.loads((path / "results" / "tiny.json").read_text())
    return {(cell["cell"], record["seed"]): record for cell in tree["cells"] for record in cell["runs"]}


def test_a_table_without_probes_is_about_a_measured_number(tmp_path, capsys):
    text = """
title = "Bits"
paper = "nobody"
about = "A."
probes = []
measures = ["repulsion"]
settings = ["encoder.name=small-conv", "encoder.width=8", "training.epochs=1", "training.batch=512"]

[[groups]]
name = "dcl"
title = "DCL"
where = "figure 0"
recipe = "black/dcl"
overrides = []
grid = { key = "data.random_bits", values = [1, 3], label = "bits" }
"""
    (tmp_path / "bits.toml").write_text(text)
    words = ["reproduce", str(tmp_path / "bits.toml"), "--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert run([*words, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.split()[:1] == ["dcl-1"] and line.split()[2:] == ["0"] for line in printed)
    page = (tmp_path / "bits.md").read_text()
    assert "| repulsion at the end |" in page and "Accuracies" not in page
    values = [
        cell["runs"][0]["numbers"]["repulsion"] for cell in json.loads((tmp_path / "bits.json").read_text())["cells"]
    ]
    assert values[0] > values[1] and f"| {values[0]:.3f} |" in page
    assert "Repulsion at the end by bits" in (tmp_path / "bits-bits.svg").read_text()


def test_list_is_quick_and_needs_no_torch():
    code = "import sys; from kontrast.cli.main import run; run(['reproduce', '--list']); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    lines = out.splitlines()
    assert lines[-1] == "False" and any(line.startswith("cacr-table-2 ") for line in lines) and len(lines) >= 8


def test_list_of_a_table_shows_its_cells(tmp_path, capsys):
    assert run(["reproduce", "cacr-table-2", "--list", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["cl", "83.47", "not", "run", "regular", "cifar10/cl"]
    assert run(["reproduce", "--list", "--json"]) == 0
    assert "dcl-batch-sizes" in json.loads(capsys.readouterr().out)


def test_the_page_of_a_table_names_the_command_that_makes_it(tmp_path):
    """A table of the user is named by its file."""
    (tmp_path / "my table.toml").write_text(TABLE.replace("SOURCE", "pictures").replace("EPOCHS", "1"))
    for name, words in ((str(tmp_path / "my table.toml"), f"'{tmp_path}/my table.toml'"), ("jcl-moco", "jcl-moco")):
        table = load_table(name)
        assert f"`kontrast reproduce {words}`" in markdown(table, {"cells": []}, [])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["cacr-tabel-2"], 2, "did you mean 'cacr-table-2'?"),
        ([], 2, "--list"),
        (["cacr-table-2", "cl"], 2, "unexpected argument 'cl'"),
        (["cacr-table-2", "--cells", "cll"], 2, "did you mean 'cl"),
        (["cacr-table-2", "--seeds", "none"], 2, "--seeds 'none'"),
        (["cacr-table-2", "--jobs", "0"], 2, "'--jobs'"),
        (["cacr-table-2", "training.epoch=3"], 2, "unknown key 'training.epoch'"),
        (["cacr-table-2", "--data", "no-such-folder"], 3, "no-such-folder"),
        (["nowhere.toml"], 2, "nowhere.toml"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, code, words, tmp_path, capsys):
    place = ["--out", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    assert run(["reproduce", *arguments, *place]) == code
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("kontrast: ") and words in said[-1], said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("table", ["", "cacr-table-2", "uniclr-figure-2"])
def test_lists_fit_a_terminal_of_80_columns(table, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert run(["reproduce", *([table] if table else []), "--list", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) > 7


GRID = """
[[groups]]
name  = "grid"
title = "Grid"
where = "figure 1"
recipe = "quickstart"
grid = { key = "training.lr", label = "lr", values = [0.1, 0.2], paper = [1.0, 2.0] }
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("values = [0.1, 0.2]", 'values = ["a", "b"]', "can't be read"),
        ("paper = [1.0, 2.0]", "paper = [1.0]", "'grid' with 2 values but 1 paper numbers"),
        ('["linear", "knn"]', '["linear", "kn"]', "unknown probe 'kn': did you mean 'knn'?"),
        ('["linear", "knn"]\nmeasures = ["multiplier", "positives"]', "[]", "has no probes and no measures"),
        ('["linear", "knn"]\nmeasures = ["multiplier",', "[]\nmeasures = [", "'positives' is not one number: give a"),
        ('["multiplier", "positives"]', '["multiplyer"]', "unknown measure 'multiplyer': did you mean 'multiplier'?"),
        ('"training.batch=32"', '"training.batch=32", "training.epochs=0"', "cell 'nt': training.epochs=0"),
        ('"digits/dcl"', '"digits/dlc"', "cell 'dcl': unknown recipe 'digits/dlc'"),
        ('"digits/dcl" }', '"digits/dcl", overrides = ["objective.temperature=-1"] }', "cell 'dcl': "),
        ('"digits/dcl" }', '"quickstart", learner = "VEA" }', "learner 'VEA'"),
        ('label = "DCL"', "lable = 3", "has no 'label'"),
        ('"quickstart", paper = 12.5', '"quickstart", paper = "x"', "'x'"),
        ('recipe = "digits/dcl"', 'recipes = "digits/dcl"', "'recipes'"),
    ],
)
def test_a_wrong_table_is_refused_before_anything_trains(old, new, words, tiny, tmp_path, capsys):
    command, table = tiny(), tmp_path / "tiny.toml"
    text = table.read_text() + GRID
    assert text.count(old) == 1
    table.write_text(text.replace(old, new))
    assert run(command) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert "tiny.toml" in said and words in said
    assert not (tmp_path / "runs").exists() and not (tmp_path / "results").exists()


def test_a_table_without_cells_is_refused(tiny, tmp_path, capsys):
    command, table = tiny(), tmp_path / "tiny.toml"
    text = table.read_text()
    table.write_text("groups = []\n" + text[: text.index("[[groups]]")])
    assert run(command) == 2
    assert "tiny.toml' has no cells" in capsys.readouterr().err
    assert run([*command, "--list"]) == 2


def test_a_table_is_run_cell_by_cell(tiny, tmp_path, capsys):
    assert run([*tiny(), "--cells", "nt"]) == 0
    first = stored(tmp_path)
    assert run([*tiny(), "--seeds", "2", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert [cell["cell"] for cell in found["cells"]] == ["nt", "dcl"] and "nt-seed0: already finished" in captured.err
    both = stored(tmp_path)
    assert set(both) == {("nt", 0), ("nt", 1), ("dcl", 0), ("dcl", 1)} and both["nt", 0] == first["nt", 0]
    record = both["dcl", 1]
    assert record["epochs"] == 2 and record["device"].startswith("CPU") and record["seconds"] > 0
    assert record["peak_memory_bytes"] > 1e7
    assert set(record["probes"]) == {"linear", "knn"} and 0 < record["numbers"]["multiplier"] < 1
    assert record["probes"]["linear"]["accuracy"] <= record["numbers"]["top5"] <= 1
    assert len(record["curves"]["knn"]) == 2 and [at for at, _ in record["curves"]["multiplier"]] == [0, 1, 2]
    assert sum(share for _, share in record["curves"]["cosine_histogram"]) == pytest.approx(1)
    text = (tmp_path / "results" / "tiny.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| NT-Xent | 12.5 | figure 0 |"))
    mean = 50 * sum(both["nt", seed]["probes"]["linear"]["accuracy"] for seed in (0, 1))
    ranks = [both["nt", seed]["curves"]["effective_rank"][-1][1] for seed in (0, 1)]
    seeds = " ".join(f"{seed} (collapsed)" if rank < 1.5 else f"{seed}" for seed, rank in enumerate(ranks))
    assert "| time per run | peak memory |" in text and row.endswith(" MiB |")
    assert f"| {mean:.2f} |" in row and "(seeds) |" in row and f"| {seeds} | 2 |" in row and "torch" in row
    assert "## kNN accuracy by epoch, first seed" in text and "## Mean multiplier by epoch, first seed" in text


def test_overrides_are_stored_apart_and_a_changed_table_is_refused(tiny, tmp_path, capsys):
    assert run([*tiny(1), "--cells", "nt"]) == 0
    assert run([*tiny(1), "--cells", "nt", "objective.temperature=0.5"]) == 0
    cells = json.loads((tmp_path / "results" / "tiny.json").read_text())["cells"]
    assert [cell["changed"] for cell in cells] == [{}, {"objective.temperature": 0.5}]
    assert run([*tiny(2), "--cells", "nt", "--seeds", "2"]) == 2
    assert "training.epochs 1 -> 2" in capsys.readouterr().err


KILLED_AT_THE_THIRD_CHECKPOINT = """
import os, signal, sys
checkpoints = []

def kill(event, arguments):
    if event == "os.rename" and "dcl-seed0" in str(arguments[1]) and "step-" in str(arguments[1]):
        checkpoints.append(arguments[1])
        if len(checkpoints) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
from kontrast.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def test_a_killed_table_is_resumed_to_the_same_numbers(tiny, tmp_path, capsys):
    """SIGKILL in the middle of the second cell: the first is read, the second is resumed from its checkpoint."""
    epochs = 4
    command = [sys.executable, "-c", KILLED_AT_THE_THIRD_CHECKPOINT, *tiny(epochs)]
    killed = subprocess.run(command, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    second, before = tmp_path / "runs" / "tiny" / "dcl-seed0", stored(tmp_path)
    assert set(before) == {("nt", 0)} and not (second / "encoder.safetensors").exists()
    assert run(tiny(epochs)) == 0
    said = capsys.readouterr().err
    assert "nt-seed0: already finished" in said and "from step" in said
    after = stored(tmp_path)
    assert after["nt", 0] == before["nt", 0]
    assert run([*tiny(epochs, "whole"), "--cells", "dcl"]) == 0
    undisturbed = stored(tmp_path / "whole")["dcl", 0]
    for part in ("probes", "numbers", "curves", "steps", "epochs"):
        assert after["dcl", 0][part] == undisturbed[part], part


def test_a_cell_can_be_an_autoencoder(tiny, tmp_path):
    command = tiny(1)
    table = tmp_path / "tiny.toml"
    table.write_text(table.read_text().replace('recipe = "digits/dcl"', 'recipe = "quickstart", learner = "VAE"'))
    assert run([*command, "--cells", "dcl"]) == 0
    record = stored(tmp_path)["dcl", 0]
    assert set(record["probes"]) == {"linear", "knn"} and record["epochs"] == 1 and record["seconds"] > 0


@pytest.mark.parametrize("learner, epochs", [("supervised", 1), ("untrained", 0)])
def test_a_cell_can_be_a_control(learner, epochs, tiny, tmp_path):
    """Supervised training and an untrained encoder, on images with an added feature, which is probed too."""
    command = tiny(1)
    table = tmp_path / "tiny.toml"
    cell = f'recipe = "quickstart", learner = "{learner}", overrides = ["data.random_bits=2"]'
    table.write_text(table.read_text().replace('recipe = "digits/dcl"', cell))
    assert run([*command, "--cells", "dcl"]) == 0
    record = stored(tmp_path)["dcl", 0]
    probes = record["probes"]
    assert set(probes) == {"linear", "knn"} and record["epochs"] == epochs
    assert probes["knn"]["n"] == probes["linear"]["n"] and probes["knn"]["accuracy"] != probes["linear"]["accuracy"]
    assert 0.5 < record["numbers"]["added_feature"] <= 1


def test_every_measure_of_a_run_is_stored(tiny, tmp_path):
    """Those of GCL's figures 3, 5 and C.2 and of CACR's figure 10 and tables 14 and 17."""
    command = tiny(2)
    table = tmp_path / "tiny.toml"
    wanted = '["added_feature", "projections", "linear_by_epoch", "training_loss", "step_time"]'
    text = table.read_text().replace('["multiplier", "positives"]', wanted)
    table.write_text(
        text.replace('"encoder.width=8",', '"encoder.width=8", "data.random_bits=1", "training.log_every=1",')
    )
    assert run([*command, "--cells", "nt"]) == 0
    record = stored(tmp_path)["nt", 0]
    numbers = record["numbers"]
    assert 0 < numbers["added_feature"] <= 1 and 0 < numbers["projection_distance"] < 1
    assert numbers["step_time"] > 0 and "step_time" not in record["errors"]
    lines = [json.loads(line) for line in (tmp_path / "runs/tiny/nt-seed0/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert numbers["training_loss"] == pytest.approx(losses[-1], rel=1e-5)
    assert [at for at, _ in record["curves"]["linear"]] == [0, 1, 2]
    assert record["curves"]["linear"][-1][1] == pytest.approx(record["probes"]["linear"]["accuracy"], abs=0.03)
    assert numbers["linear_area"] == pytest.approx(sum(y for _, y in record["curves"]["linear"]) / 3)


@pytest.mark.slow
def test_two_jobs_are_two_processes(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run([*tiny(1), "--jobs", "2"]) == 0
    found = stored(tmp_path)
    assert set(found) == {("nt", 0), ("dcl", 0)} and {r["at_once"] for r in found.values()} == {2}
    said = capsys.readouterr().err
    assert "nt-seed0: started" in said and "[2/2] " in said
    assert "(2 at once)" in (tmp_path / "results" / "tiny.md").read_text()


@pytest.mark.slow
def test_a_signal_stops_all_jobs_and_failures_have_their_exit_code(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "kontrast", *tiny(400), "--jobs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    runs = [tmp_path / "runs" / "tiny" / f"{name}-seed0" for name in ("nt", "dcl")]
    while process.poll() is None and not all(list(r.glob("checkpoints/step-*")) for r in runs):
        time.sleep(0.05)
    process.terminate()
    said = process.communicate()[1]
    assert process.returncode == 75 and "run the same command again" in said
    assert not (tmp_path / "results" / "tiny.json").exists()
    broken = [*tiny(2, "again"), "--jobs", "2", "training.lr=1e30"]
    assert run(broken) == 5
    assert all("failed" in record for record in stored(tmp_path / "again").values())


def test_an_imbalanced_subset_is_probed_on_the_whole_set(tmp_path):
    """Exponential imbalance leaves a class without images, but kNN during the training uses the whole set."""
    words = [
        "training.max_steps=2",
        "training.batch=16",
        "encoder.width=8",
        "evaluation.every=1",
        "data.imbalance=exponential",
    ]
    place = ["--out", str(tmp_path / "run"), "--device", "cpu", "--no-probes"]
    assert run(["pretrain", str(images()), "--recipe", "quickstart", *words, "data.allow_small=true", *place]) == 0
    assert '"knn"' in (tmp_path / "run" / "metrics.jsonl").read_text()
