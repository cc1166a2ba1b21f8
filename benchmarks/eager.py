"""Time every objective at a small batch, forward and backward: called from Python, and captured in a CUDA graph.

    python benchmarks/eager.py [--pairs 256] [--json FILE]

At this size the host decides how long a call takes: Python, autograd and launches. Plain torch's NT-Xent, three lines
that store the matrix, is timed in the same run for comparison; all of them take turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from kernels import captured, milliseconds_in_turn, plain, step, views
from needed_inputs import needed_inputs

from kontrast.objectives import OBJECTIVES, objective

WIDTH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this race needs a CUDA device: it times launches")
    losses: dict[str, Callable] = {"plain torch": plain}
    for name in OBJECTIVES:
        loss = objective(name).cuda()
        losses[name] = partial(loss, **needed_inputs(loss, arguments.pairs, WIDTH, "cuda"))
    cases, calls = [], []
    for name, loss in losses.items():
        for kind in (torch.float32, torch.bfloat16):
            cases.append((name, kind, loss, views(arguments.pairs, WIDTH, kind, "cuda")))
            calls.append(partial(step, loss, *cases[-1][-1]))
            for _ in range(3):
                calls[-1]()
    rows = []
    print(f"{'objective':<20}{'type':<10}{'ms':>9}{'captured':>10}")
    for (name, kind, loss, z), ms in zip(cases, milliseconds_in_turn(calls, "cuda", 0.4)):
        row = {"objective": name, "type": str(kind), "ms": ms, "captured ms": captured(loss, *z, 0.2)}
        rows.append(row)
        print(f"{name:<20}{str(kind)[6:]:<10}{row['ms']:>9.3f}{row['captured ms']:>10.3f}", flush=True)
    if arguments.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        arguments.json.write_text(json.dumps({**facts, "pairs": arguments.pairs, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
