"""Load: many steps, many files, many classes, many runs, many rows. The full sizes run with `-m slow`.

results/faults/load.md has the figures of the full sizes.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from kontrast.data import open_data

from support.command_line import kontrast
from support.commands import Command
from support.fuzzing import amounts
from support.made_images import QUICK, encoded, folder_of, picture

GIB = 2**30


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def print_figures(**found: object) -> None:
    """Print what was measured (`pytest -s` shows it)."""
    print("\nmeasured", json.dumps(found))


def in_a_fresh_process(tmp_path, work) -> dict:
    """Return what `work` returns in a forked process, with the peak memory of that process."""
    answer = tmp_path / "answer.json"

    def instead() -> int:
        before = resident_bytes()
        found = work()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer.write_text(json.dumps({**found, "resident_before": before, "peak": peak}))
        return 0

    command = Command(tmp_path / "log", instead=instead)
    assert command.wait() == 0, command.said
    return json.loads(answer.read_text())


@pytest.mark.fault(1)
@amounts(60, 10_000)
def test_memory_and_open_files_stay_constant(tmp_path, cases):
    """Over thousands of small steps with checkpoints, memory grows by less than 2% and open files don't increase."""
    from kontrast.training import step

    root, first = folder_of(tmp_path / "pictures", 64), cases // 3
    seen: list[tuple[int, int, int]] = []

    def work() -> dict:
        step_once = step.Step.__call__

        def watched(self, *arguments, **of_images):
            done = step_once(self, *arguments, **of_images)
            watched.count += 1
            if watched.count % max(1, cases // 6) == 0:
                gc.collect()
                seen.append((watched.count, resident_bytes(), open_handles()))
            return done

        watched.count = 0
        step.Step.__call__ = watched
        tiny = [q for q in QUICK if "epochs" not in q and "max_steps" not in q and "log_every" not in q]
        epochs = -(-cases // 4)
        start = time.monotonic()
        argv = [*tiny, f"training.epochs={epochs}", f"training.max_steps={cases}", "training.log_every=100"]
        argv += [
            f"checkpoints.every={epochs / (40 if cases > 1_000 else 4):g}",
            "views.size=8",
            "--out",
            str(tmp_path / "run"),
        ]
        done = kontrast("pretrain", str(root), *argv, "--no-probes", "--device", "cpu")
        assert done.returncode == 0, done.stderr
        return {"seen": seen, "seconds": time.monotonic() - start}

    found = in_a_fresh_process(tmp_path, work)
    later = [entry for entry in found["seen"] if entry[0] >= first]
    growth = later[-1][1] / later[0][1] - 1
    seconds, peak = found["seconds"], found["peak"]
    print_figures(steps=cases, seconds=seconds, growth=growth, first=later[0], last=later[-1], peak=peak)
    assert growth < 0.02, later
    assert later[-1][2] <= later[0][2], later


@pytest.mark.fault(17)
@amounts(1_000, 200_000)
def test_many_files(tmp_path, cases):
    """Hard links to a few images are all listed and packed, and the second start uses the store."""
    root = tmp_path / "pictures"
    originals = [encoded(picture(n, 8), "PNG") for n in range(50)]
    for number, content in enumerate(originals):
        (root / f"class{number % 10}").mkdir(parents=True, exist_ok=True)
        (root / f"class{number % 10}" / f"{number:07d}.png").write_bytes(content)
    for number in range(50, cases):
        folder = root / f"class{number % 10}"
        os.link(folder / f"{number % 50:07d}.png", folder / f"{number:07d}.png")

    def work() -> dict:
        from kontrast.data.listing import scan_folder

        start = time.monotonic()
        assert len(scan_folder(str(root)).items) == cases
        scan = time.monotonic() - start
        assert len(open_data(root, "all")) == cases
        packed = time.monotonic() - start - scan
        images = open_data(root, "all")
        again = time.monotonic() - start - scan - packed
        assert len(images.classes) == 10 and len(images) == cases
        return {"scan": scan, "pack": packed, "again": again}

    found = in_a_fresh_process(tmp_path, work)
    print_figures(files=cases, **found)
    assert found["peak"] < 4 * GIB


@pytest.mark.fault(37)
@amounts(60, 1_000)
def test_many_classes(tmp_path, cases):
    """A thousand class folders are trained on, probed and reported; every class is among the held-out images."""
    root = tmp_path / "pictures"
    for number in range(cases):
        folder = root / f"class-{number:04d}"
        folder.mkdir(parents=True)
        for copy in range(5):
            picture(number * 7 + copy, 8).save(folder / f"{copy}.png")

    def work() -> dict:
        start = time.monotonic()
        done = kontrast("pretrain", str(root), *QUICK, "--device", "cpu", "--out", str(tmp_path / "run"))
        assert done.returncode == 0, done.stderr
        return {"seconds": time.monotonic() - start, "page": (tmp_path / "run" / "report.html").stat().st_size}

    found = in_a_fresh_process(tmp_path, work)
    print_figures(classes=cases, **found)
    probes = json.loads((tmp_path / "run" / "probes.json").read_text())["probes"]
    assert all(p["n"] == cases and 0 <= p["accuracy"] <= 1 for p in probes) and len(probes) == 6
    assert found["page"] < 20_000_000 and found["peak"] < 4 * GIB


@pytest.mark.fault(39)
@amounts(8, 50)
def test_report_about_many_runs(tmp_path, cases):
    """One page about fifty runs with thousands of lines each has less than 20 MB."""
    import shutil

    from support import tiny_run

    runs = []
    for number in range(cases):
        run = Path(
            shutil.copytree(
                tiny_run.trained(), tmp_path / f"run-{number:03d}", ignore=shutil.ignore_patterns("checkpoints")
            )
        )
        lines = [{"step": s, "epoch": s / 50, "loss": 5 / (1 + s + number), "lr": 0.1} for s in range(1, 5_001)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.append(str(run))

    def work() -> dict:
        start = time.monotonic()
        done = kontrast("report", *runs, "--out", str(tmp_path / "page.html"))
        assert done.returncode == 0, done.stderr
        return {"seconds": time.monotonic() - start, "page": (tmp_path / "page.html").stat().st_size}

    found = in_a_fresh_process(tmp_path, work)
    print_figures(runs=cases, **found)
    assert found["page"] < 20_000_000 and found["peak"] < 4 * GIB


@pytest.mark.fault(38)
@amounts(20_000, 1_000_000)
def test_knn_on_many_rows(tmp_path, cases):
    """kNN on a million embeddings of width 512 finds the right neighbors within 4 GiB."""
    width = 512 if cases > 100_000 else 64
    path = tmp_path / "vectors.npy"
    vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(cases, width))
    draw = np.random.default_rng(0)
    centres = draw.standard_normal((10, width)).astype(np.float32)
    for start in range(0, cases, 50_000):
        rows = np.arange(start, min(start + 50_000, cases))
        vectors[rows] = centres[rows % 10] + draw.standard_normal((len(rows), width)).astype(np.float32)
    vectors.flush()
    del vectors

    def work() -> dict:
        from kontrast.probes import knn
        from kontrast.runs.embeddings_file import read_embeddings

        start = time.monotonic()
        file = read_embeddings(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about read-only memory
            rows = torch.from_numpy(file.vectors)
        queries = torch.randperm(cases, generator=torch.Generator().manual_seed(0))[:500]
        found = knn(rows, torch.arange(cases) % 10, file.rows(queries.numpy()), queries % 10, k=200)
        return {"accuracy": found.accuracy, "seconds": time.monotonic() - start, "width": width}

    found = in_a_fresh_process(tmp_path, work)
    print_figures(rows=cases, **found)
    assert found["accuracy"] > 0.99
    assert found["peak"] < 4 * GIB
