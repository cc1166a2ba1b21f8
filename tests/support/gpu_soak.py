"""A soak test on one GPU: interruptions at full speed, constant memory, growing batches, numbers, determinism.

    PYTHONPATH=src:tests python tests/support/gpu_soak.py [--parts G1 G2 G3 G4 G5] [--json FILE]

Every part prints what it measured and passes or fails; the exit code is 0 if all pass. Runs are forks of this process,
which imports torch once and never uses the GPU itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from kontrast.cli import main as cli
from kontrast.objectives import OBJECTIVES, objective

from support.commands import Command, ends, until
from support.objective_inputs import extra_inputs

PLAIN = ["evaluation.every=0", "evaluation.gallery=0", "training.log_every=20"]
FULL_SPEED = [
    *PLAIN, "encoder.name=resnet-18", "encoder.stem=cifar", "head.name=simclr", "objective.name=nt-xent",
    "training.batch=512", "training.epochs=100", "checkpoints.every=2", "checkpoints.keep=3",
    "training.deterministic=true",
]  # fmt: skip
KEYED = {"teacher": {"momentum": 0.9}, "bank": {"size": 4096}}
OPTIONS: dict[str, dict] = {
    "info-nce": KEYED,
    "jcl": {"teacher": {"momentum": 0.9, "symmetric": False}, "bank": {"size": 4096, "contents": "means"}},
    "alignment": {"teacher": {"momentum": 0.9}, "predictor": {"name": "byol", "hidden": 256}},
}


def command(log: Path, out: Path, *argv: str) -> Command:
    log.unlink(missing_ok=True)  # what the last one said must not be taken for this one's
    return Command(log, instead=lambda: cli.run(["pretrain", "--no-probes", "--out", str(out), *argv]))


def interruptions(place: Path, terms: int = 6, kills: int = 4) -> dict:
    """G1: a bf16 run at full speed, interrupted and resumed, ends with the bits of an undisturbed one."""
    draw = random.Random(0)
    began = time.monotonic()
    whole = command(place / "log", place / "whole", *FULL_SPEED)
    assert whole.wait() == 0, whole.said
    undisturbed = time.monotonic() - began
    signals = [signal.SIGTERM] * terms + [signal.SIGKILL] * kills
    draw.shuffle(signals)
    run, codes = place / "disturbed", []
    for number, what in enumerate(signals):
        logged = lines(run)
        going = command(place / "log", run, *(["--resume"] if number else FULL_SPEED))
        until(lambda before=logged, log=place / "log": lines(run) > before or failed(log), 120)
        time.sleep(draw.uniform(0.2, 1.5))
        going.send(what)
        codes.append(going.wait())
    last = command(place / "log", run, "--resume")
    assert last.wait() == 0, last.said
    same = {name: ends(run)[name] == content for name, content in ends(place / "whole").items()}
    wanted = [75 if s == signal.SIGTERM else -9 for s in signals]
    digest = hashlib.sha256(ends(run)["encoder"]).hexdigest()
    seen = {"exit_codes": codes, "equal": same, "encoder_sha256": digest, "undisturbed_seconds": undisturbed}
    return {"passed": codes == wanted and all(same.values()), **seen}


def failed(log: Path) -> bool:
    return log.exists() and b"kontrast:" in log.read_bytes()


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def memory_of(name: str, out: Path, steps: int) -> int:
    """G2, one objective: GPU memory at 500 steps and at the end, and host memory, in its own process."""
    from kontrast.config.recipe import read_recipe
    from kontrast.optim.optimizers import build_optimizer
    from kontrast.training.build import build_learner, build_views
    from kontrast.training.step import Step
    from kontrast.training.step_schedule import Schedule
    from kontrast.views import keys

    device = torch.device("cuda")
    tree = {
        "objective": {"name": name}, "encoder": {"name": "small-conv", "width": 32}, "training": {"batch": 256},
        "views": {"count": 2 if name != "jcl" else 4, "size": 32, "policy": "simclr-cifar"}, **OPTIONS.get(name, {}),
    }  # fmt: skip
    recipe = read_recipe(tree)
    learner = build_learner(recipe, 3, device)
    views = build_views(recipe, torch.bfloat16)
    step = Step(learner, build_optimizer(learner, "sgd", 0.01), views, device=device, precision=torch.bfloat16)
    images = torch.randint(0, 256, (2048, 3, 32, 32), dtype=torch.uint8, device=device)
    numbers = torch.arange(2048, device=device)
    learner.train()
    seen = []
    for number in range(steps):
        at = number * 256 % 2048
        step(images[at : at + 256], keys(0, number // 8, numbers[at : at + 256]), Schedule(lr=0.01, momentum=0.9))
        if number in (499, steps - 1):
            torch.cuda.synchronize()
            host = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host))
    (a0, r0, h0), (a1, r1, h1) = seen
    growth = (h1 - h0) / 2**20 / ((steps - 500) / 1000)
    good = a0 == a1 and r0 == r1 and growth < 1 and step.check() is None and step.captured
    record = {"allocated": a1, "grown": a1 - a0, "reserved_grown": r1 - r0, "host_mib_per_1000": round(growth, 3)}
    out.write_text(json.dumps({"passed": good, "captured": step.captured, **record}))
    return 0


def memory(place: Path, steps: int = 3000) -> dict:
    """G2: memory stays constant over 3,000 captured steps with every objective."""
    found = {}
    for name in OBJECTIVES:
        out = place / f"{name}.json"
        child = Command(place / "log", instead=partial(memory_of, name, out, steps))
        code = child.wait()
        found[name] = json.loads(out.read_text()) if code == 0 else {"passed": False, "said": child.said[-400:]}
    return {"passed": all(f["passed"] for f in found.values()), "steps": steps, "objectives": found}


def ladder_in_one_process(place: Path) -> int:
    """G3: the batch doubles until memory runs out, in one process; the last good size works again afterwards."""
    from kontrast.errors import EnvironmentFault
    from kontrast.training.pretrain import pretrain

    said: dict = {"batches": []}
    options = [*PLAIN, "encoder.name=resnet-50", "views.size=224", "training.max_steps=3", "training.compile=no"]

    def take(batch: int, number: int) -> float:
        torch.cuda.reset_peak_memory_stats()
        pretrain(out=place / f"ladder-{number}", overrides=[*options, f"training.batch={batch}"])
        return torch.cuda.max_memory_allocated() / 2**30

    batch, number, peaks = 128, 0, {}
    while "error" not in said and batch <= 4096:
        try:
            peaks[batch] = take(batch, number)
            batch, number = batch * 2, number + 1
        except EnvironmentFault as fault:
            said["error"] = str(fault)
            said["left"] = [p.name for p in (place / f"ladder-{number}" / "checkpoints").glob("*")]
    good = batch // 2
    again = take(good, number + 1)
    said |= {
        "peaks_gib": {str(b): round(p, 2) for b, p in peaks.items()},
        "out_at": batch,
        "again_gib": round(again, 2),
    }
    said["passed"] = "out of GPU memory" in said.get("error", "") and abs(again / peaks[good] - 1) < 0.05
    (place / "ladder.json").write_text(json.dumps(said))
    return 0


def numbers_in_one_process(place: Path) -> int:
    """G4: every objective with a temperature, from 0.005 to 0.5, in three types, is finite and close to float64."""
    bad, cases = [], 0
    draw = torch.Generator().manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(2, 160, 128, generator=draw), dim=-1)
    for name in OBJECTIVES:
        made = objective(name)
        if not hasattr(made, "temperature"):
            continue
        for tau in (0.005, 0.01, 0.05, 0.1, 0.5):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                cases += 1
                x = z.to("cuda", dtype).requires_grad_()
                loss = objective(name, temperature=tau)(x, **extra_inputs(name, x.detach()))
                loss.backward()
                exact = x.detach().double().cpu()
                true = objective(name, temperature=tau)(exact, **extra_inputs(name, exact))
                off = abs(loss.item() - true.item()) / (1 + abs(true.item()))
                if not torch.isfinite(x.grad).all() or not off < (1e-4 if dtype == torch.float32 else 2e-2):
                    bad.append(f"{name} tau {tau} {dtype}: {loss.item()} for {true.item()}")
    (place / "numbers.json").write_text(json.dumps({"passed": not bad and cases > 50, "cases": cases, "bad": bad}))
    return 0


def numbers(place: Path) -> dict:
    """G4: the grid of temperatures; learning rates 100 and 1e30 times too high end well or with exit code 5."""
    assert Command(place / "log", instead=partial(numbers_in_one_process, place)).wait() == 0, (
        place / "log"
    ).read_text()
    found = json.loads((place / "numbers.json").read_text())
    for lr in (6.0, 1e30):
        run = place / f"lr-{lr:g}"
        child = command(place / "log", run, *PLAIN, f"training.lr={lr}", "training.max_steps=60", "training.warmup=0")
        code, said = child.wait(), child.said
        found[f"lr {lr:g}"] = {"exit": code, "said": said.strip().splitlines()[-1][:300] if code else ""}
        found["passed"] &= (code == 5 and "not finite at step" in said) if lr > 1e6 else code in (0, 5)
    return found


def determinism(place: Path) -> dict:
    """G5: the same seed gives the same bits; a batch in two parts, without batch norm, gives the same loss to 1e-2."""
    base = [*PLAIN, "training.deterministic=true", "training.max_steps=40", "training.batch=512"]
    plain = ["encoder.name=vit-tiny", "head.name=linear", "training.optimizer=adamw", "training.lr=0.0003"]
    runs = {"first": [], "second": [], "whole": plain, "parts": [*plain, "training.accumulate=2"]}
    for name, more in runs.items():
        child = command(place / "log", place / name, *base, *more)
        assert child.wait() == 0, child.said
    same = ends(place / "first") == ends(place / "second")
    curves = [losses(place / name) for name in ("whole", "parts")]
    off = max(abs(a - b) for a, b in zip(*curves))
    return {"passed": same and off < 1e-2, "twice_equal": same, "whole_against_parts": off}


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def ladder(place: Path) -> dict:
    """G3: out of memory is exit code 6 with advice and no partial checkpoint, and the process can continue."""
    child = Command(place / "log", instead=partial(ladder_in_one_process, place))
    assert child.wait() == 0, child.said
    found = json.loads((place / "ladder.json").read_text())
    return found | {"passed": found["passed"] and not [n for n in found["left"] if n.startswith(".tmp")]}


PARTS: dict[str, Callable[[Path], dict]] = {
    "G1": interruptions, "G2": memory, "G3": ladder, "G4": numbers, "G5": determinism
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.backends.cuda.is_built() or not Path("/proc/driver/nvidia").exists():
        print("no NVIDIA GPU here")
        return 6
    found: dict = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    for name in arguments.parts:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            try:
                record = PARTS[name](Path(place))
            except Exception as error:
                record = {"passed": False, "error": f"{type(error).__name__}: {error}"[-1500:]}
        found[name] = {"what": PARTS[name].__doc__, **record, "seconds": round(time.monotonic() - began, 1)}
        print(f"{name} {'passed' if record['passed'] else 'FAILED'} {json.dumps(found[name])[:1500]}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
    return 0 if all(found[name]["passed"] for name in arguments.parts) else 1


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    raise SystemExit(main())
