"""Measure the time to the first step, with an empty and with a kept compiler cache, and the speed that follows.

    python benchmarks/start.py [--cases resnet-18-32 resnet-50-224] [--modes whole blocks] [--json FILE]

Each measurement is a new process, whose time counts from its start: importing, building, the first step (in which the
networks are compiled), the steps before the CUDA graph is captured, and the capture. `whole` compiles whole networks,
`blocks` equal blocks once (training.compile=blocks). "cold" begins with empty caches of the compiler and of Triton,
"warm" with those that the process before left. The images are random pixels on the device. Without a GPU the case is
small-resnet-32, which shows the mechanism alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES: dict[str, tuple[str, int, int]] = {
    "resnet-18-32": ("resnet-18", 32, 512),
    "resnet-50-224": ("resnet-50", 224, 128),
    "small-resnet-32": ("small-resnet", 32, 32),
    "vit-tiny-32": ("vit-tiny", 32, 32),
}
"""Encoder, side of the views and images per step."""
STEPS = 6  # after which the step is captured on a GPU


def measure(case: str, mode: str, spawned: float, steps: int) -> dict[str, Any]:
    """Train in this process and return how many seconds after its start everything happened."""
    import torch

    from kontrast.config.recipe import read_recipe
    from kontrast.data import Feeder, ImageSet
    from kontrast.optim.optimizers import build_optimizer
    from kontrast.training.build import algorithms, build_views, precision
    from kontrast.training.compiled_blocks import keep_compiled_code
    from kontrast.training.learner import Learner
    from kontrast.training.step import Step
    from kontrast.training.step_schedule import Schedule
    from kontrast.views import keys

    found: dict[str, Any] = {"imported": time.time() - spawned}
    name, size, batch = CASES[case]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = "simclr-cifar" if size <= 64 else "moco-v2"
    recipe = read_recipe({
        "encoder": {"name": name}, "views": {"policy": policy, "count": 2, "size": size}, "training": {"batch": batch},
    })  # fmt: skip
    side = size if size <= 64 else size * 8 // 7
    pixels = torch.randint(0, 256, (4 * batch, 3, side, side), dtype=torch.uint8)
    images = ImageSet(images=pixels, names=[str(i) for i in range(len(pixels))], name="random")
    keep_compiled_code()
    with algorithms(deterministic=False):
        torch.manual_seed(0)
        learner = Learner(recipe).to(device).to(memory_format=torch.channels_last)
        optimizer = build_optimizer(learner, "sgd", 0.06, momentum=0.9, weight_decay=5e-4)
        dtype = precision("auto", device)
        compiled = "" if mode == "no" else mode
        step = Step(learner, optimizer, build_views(recipe, dtype), device=device, precision=dtype, compile=compiled)
        feeder = Feeder(images, batch=batch, seed=0, device=device)
        batches = (b for epoch in range(10_000) for b in feeder.batches(epoch))
        learner.train()

        def take(count: int) -> None:
            for _ in range(count):
                given = next(batches)
                step(given.images, keys(0, 0, given.indices), Schedule(lr=0.06), sizes=given.sizes)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        found["built"] = time.time() - spawned
        for number in range(1, STEPS + 1):
            take(1)
            found[f"step {number}"] = time.time() - spawned
        begin = time.perf_counter()
        take(steps)
        found["views per second"] = 2 * batch * steps / (time.perf_counter() - begin)
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found |= {"captured": step.captured, "torch": str(torch.__version__), "device": device_name}
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}


def child(case: str, mode: str, steps: int, home: str) -> dict[str, Any]:
    """Measure in a new process, whose compiler and Triton have their caches below `home`."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor", "TRITON_CACHE_DIR": f"{home}/triton"}
    caches |= {"KONTRAST_CACHE": f"{home}/kontrast", "CUDA_CACHE_PATH": f"{home}/cuda"}
    words = [sys.executable, __file__, "--child", case, mode, str(time.time()), "--steps", str(steps)]
    done = subprocess.run(words, env={**os.environ, **caches}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case}, {mode}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=None)
    parser.add_argument("--modes", nargs="*", choices=("whole", "blocks", "no"), default=["whole", "blocks"])
    parser.add_argument("--steps", type=int, default=30, help="steps whose speed is measured")
    parser.add_argument("--child", nargs=3, metavar=("CASE", "MODE", "TIME"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.child:
        case, mode, spawned = given.child
        print(json.dumps(measure(case, mode, float(spawned), given.steps)))
        return
    cases = given.cases
    if cases is None:
        cases = ["resnet-50-224", "resnet-18-32"] if Path("/dev/nvidiactl").exists() else ["small-resnet-32"]
    heads = ("imported", "built", "step 1", f"step {STEPS}", "views per second")
    print(f"{'case':<16}{'mode':<8}{'cache':<6}" + "".join(f"{head:>18}" for head in heads))
    rows: list[dict[str, Any]] = []
    for case in cases:
        for mode in given.modes:
            with tempfile.TemporaryDirectory() as home:
                for cache in ("cold", "warm"):
                    found = child(case, mode, given.steps, home)
                    rows.append({"case": case, "mode": mode, "cache": cache, **found})
                    line = "".join(f"{found[head]:>18,.1f}" for head in heads)
                    print(f"{case:<16}{mode:<8}{cache:<6}{line}", flush=True)
                    if given.json:
                        facts = {"date": time.strftime("%Y-%m-%d"), "steps": given.steps, "rows": rows}
                        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
