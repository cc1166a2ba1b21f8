"""Compare the other objectives with NT-Xent: captured forward and backward passes for the same number of pairs.

    python benchmarks/family.py [--pairs 32768] [--json FILE]

One kernel serves them all, so each should cost as much as NT-Xent per entry of the affinity matrix: M rows against M
rows in the batch, or against the bank. "per entry" divides the time by entries and by scales (hard negatives use two),
relative to NT-Xent. If queries are also keys, one pass gives both gradients; with a bank only queries have a gradient.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from kontrast.objectives import objective

WIDTH = 128
CASES = [  # name, arguments, with keys and bank, scales
    ("nt-xent", {"temperature": 0.1}, False, 1),
    ("dcl", {"temperature": 0.1}, False, 1),
    ("align-uniform", {}, False, 1),
    ("hard-negative", {"temperature": 0.5, "tau_plus": 0.0}, False, 2),
    ("cacr", {"negatives": "same-view"}, False, 1),
    ("info-nce", {"temperature": 0.1}, True, 1),
    ("jcl", {"temperature": 0.2}, True, 1),
    ("cacr", {}, True, 1),
]


def entries(name: str, pairs: int, bank: bool) -> int:
    """Return the number of entries of the affinity matrix that the objective uses."""
    rows = 2 * pairs
    if not bank:
        return 2 * pairs * pairs if name in ("cacr", "align-uniform") else rows * rows  # of each view, or of all rows
    return rows * rows * (2 if name == "cacr" else 1)  # CACR also uses the queries of the batch


def replay_time(take, repeats: int) -> float:
    """Return the median milliseconds of one captured forward and backward pass."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            take()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def case(name: str, arguments: dict, bank: bool, pairs: int) -> float:
    torch.manual_seed(0)
    loss = objective(name, **arguments).cuda()
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    inputs: dict[str, Tensor] = {}
    if bank:
        z = torch.randn(1, 2 * pairs, WIDTH, **kind).requires_grad_()
        views = 5 if name == "jcl" else 1
        inputs["keys"] = z.detach() + torch.randn(views, 2 * pairs, WIDTH, **kind)
        inputs["bank"] = torch.nn.functional.normalize(torch.randn(2 * pairs, WIDTH, device="cuda"), dim=1).bfloat16()
    else:
        z = torch.randn(2, pairs, WIDTH, **kind).requires_grad_()

    def take() -> None:
        z.grad = None
        loss(z, **inputs).backward()

    return replay_time(take, 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=32_768)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this race needs a CUDA device: it times captured graphs")
    rows, base = [], 0.0
    print(f"{'objective':<16}{'bank':>6}{'ms':>9}{'entries':>10}{'scales':>8}{'per entry, NT-Xent = 1':>25}")
    for name, settings, bank, scales in CASES:
        milliseconds = case(name, settings, bank, arguments.pairs)
        unit = milliseconds / entries(name, arguments.pairs, bank) / scales
        base = base or unit
        rows.append({"objective": name, "bank": bank, "ms": milliseconds, "scales": scales, "per_entry": unit / base})
        size = entries(name, arguments.pairs, bank) / 1e9
        print(f"{name:<16}{bank!s:>6}{milliseconds:>9.2f}{size:>9.2f}G{scales:>8}{unit / base:>25.2f}", flush=True)
    if arguments.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        arguments.json.write_text(json.dumps({**facts, "pairs": arguments.pairs, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
