"""Compare NT-Xent with lightly, pytorch-metric-learning and plain torch: errors, time and memory.

    python benchmarks/kernels.py [--quick] [--pairs N ...] [--widths D ...] [--tune] [--json FILE]

Times are medians of a forward and a backward pass, for which the contenders take turns. Peers that are not installed
are skipped, and so are sizes at which a peer's matrices don't fit. Errors are relative to float64 on the same inputs,
of at most 2,048 pairs. Memory is what a call adds at its peak. On CUDA, "captured" replays the same call as a CUDA
graph, and "share" is the share of the bf16 matrix rate measured here, counting 6 M^2 D operations: three products of M
rows by M rows at width D.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
TEMPERATURE = 0.1
Loss = Callable[[Tensor, Tensor], Tensor]


def plain(z1: Tensor, z2: Tensor) -> Tensor:
    """NT-Xent as a reader of the paper would write it: the whole matrix and cross_entropy."""
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    logits = (z @ z.T / TEMPERATURE).fill_diagonal_(-torch.inf)
    target = torch.arange(len(z), device=z.device).roll(len(z1))
    return F.cross_entropy(logits if z.dtype == torch.float64 else logits.float(), target)


def contenders() -> dict[str, Loss]:
    from kontrast.objectives import objective

    nt_xent = objective("nt-xent", temperature=TEMPERATURE)
    found: dict[str, Loss] = {"kontrast": lambda z1, z2: nt_xent(z1, z2), "plain torch": plain}
    try:
        from lightly.loss import NTXentLoss

        found["lightly"] = NTXentLoss(temperature=TEMPERATURE)
    except ImportError:
        print("lightly is not installed: skipped")
    try:
        from pytorch_metric_learning.losses import NTXentLoss as Metric

        metric = Metric(temperature=TEMPERATURE)
        found["pytorch-metric-learning"] = lambda z1, z2: metric(
            torch.cat([z1, z2]), torch.arange(len(z1), device=z1.device).repeat(2)
        )
    except ImportError:
        print("pytorch-metric-learning is not installed: skipped")
    return found


def views(pairs: int, width: int, kind: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return two views with similar positives, as in training."""
    z = torch.randn(pairs, width, device=device)
    return tuple((z + torch.randn_like(z)).to(kind).requires_grad_() for _ in range(2))  # type: ignore[return-value]


def step(loss: Loss, z1: Tensor, z2: Tensor) -> Tensor:
    z1.grad = z2.grad = None
    value = loss(z1, z2)
    value.backward()
    return value.detach()


def errors(loss: Loss, pairs: int, width: int, kind: torch.dtype, device: str) -> tuple[float, float]:
    """Return the relative errors of the value and of the gradient."""
    torch.manual_seed(pairs)
    z1, z2 = views(pairs, width, kind, device)
    exact1, exact2 = (z.detach().double().requires_grad_() for z in (z1, z2))
    value, exact = step(loss, z1, z2), step(plain, exact1, exact2)
    gradient, exact_gradient = torch.cat([z1.grad, z2.grad]).double(), torch.cat([exact1.grad, exact2.grad])
    return (
        float((value.double() - exact).abs() / exact.abs()),
        float((gradient - exact_gradient).norm() / exact_gradient.norm()),
    )


def milliseconds(call: Callable[[], object], device: str, budget: float) -> float:
    """Return the median time of a call, repeated for about `budget` seconds."""
    return milliseconds_in_turn([call], device, budget)[0]


def milliseconds_in_turn(calls: list[Callable[[], object]], device: str, budget: float) -> list[float]:
    """Return the median time of each call; they take turns, so that a machine that slows down slows all of them.

    A turn is a fiftieth of a second of calls, one at least. Of several, the first does not count: it would pay for the
    caches and the memory that the contender before it has emptied.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def turn(call: Callable[[], object]) -> list[float]:
        taken = []
        while not taken or sum(taken) < 0.02:
            before = time.perf_counter()
            call()
            wait()
            taken.append(time.perf_counter() - before)
        return taken[1:] or taken

    for call in calls:
        turn(call)
    times: list[list[float]] = [[] for _ in calls]
    rounds, started = 0, time.perf_counter()
    while rounds < 3 or (time.perf_counter() - started < budget * len(calls) and rounds < 200):
        rounds += 1
        for call, taken in zip(calls, times):
            taken += turn(call)
    return [1e3 * sorted(taken)[len(taken) // 2] for taken in times]


def captured(loss: Loss, z1: Tensor, z2: Tensor, budget: float) -> float:
    """Return the milliseconds of the same call replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(loss, z1, z2)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(loss, z1, z2)
    return milliseconds(graph.replay, "cuda", budget)


def peak_mib(name: str, loss: Loss, pairs: int, width: int, kind: torch.dtype, device: str) -> float:
    """Return the memory that one call adds at its peak. On the CPU a new process reads its own high-water mark."""
    if device == "cuda":
        z1, z2 = views(pairs, width, kind, device)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(loss, z1, z2)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    command = [sys.executable, __file__, "--memory-of", name, "--type", str(kind).split(".")[1]]
    command += ["--pairs", str(pairs), "--widths", str(width)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def own_peak_mib(loss: Loss, pairs: int, width: int, kind: torch.dtype) -> float:
    def high_water() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    step(loss, *views(64, width, kind, "cpu"))
    z1, z2 = views(pairs, width, kind, "cpu")
    z1.sum().item()
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    step(loss, z1, z2)
    return (high_water() - before) / 1024


def matrix_rate() -> float:
    """Return the bf16 operations per second of a large matrix product, measured here."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / (1e-3 * milliseconds(lambda: a @ a, "cuda", 0.5))


LIMITS = {"pytorch-metric-learning": 256, "lightly": 32768, "plain torch": 32768}
"""The most pairs of each contender: pytorch-metric-learning's memory is cubic in the batch, others store matrices."""


def race(
    sizes: list[int], widths: list[int], kinds: list[torch.dtype], device: str, budget: float, save: Callable
) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    rate = matrix_rate() if device == "cuda" else None
    if device == "cuda":
        compile_kernels(kinds, widths, sizes)
    for kind in kinds:
        for width in widths:
            for pairs in sizes:
                if kind == torch.float32 and pairs * width > 2**24:
                    continue  # minutes
                for line in measure(pairs, width, kind, device, budget, rate):
                    lines.append(line)
                    show(line, lines)
                save(lines)
    return lines


def fits(name: str, pairs: int, kind: torch.dtype) -> bool:
    """Return whether a contender's matrices fit in memory, and its time in a race."""
    return pairs <= LIMITS.get(name, 2**30) and not (kind == torch.float32 and name == "lightly" and pairs > 4096)


def measure(
    pairs: int, width: int, kind: torch.dtype, device: str, budget: float, rate: float | None
) -> list[dict[str, object]]:
    """Return a line of the table for each contender."""
    losses = {name: loss for name, loss in contenders().items() if fits(name, pairs, kind)}
    exact = {name: errors(loss, min(pairs, 2048), width, kind, device) for name, loss in losses.items()}
    z1, z2 = views(pairs, width, kind, device)
    calls = [partial(step, loss, z1, z2) for loss in losses.values()]
    times = dict(zip(losses, milliseconds_in_turn(calls, device, budget)))
    lines = []
    for name, loss in losses.items():
        line: dict[str, object] = {"type": str(kind), "width": width, "pairs": pairs, "loss": name}
        line |= dict(zip(("value error", "gradient error"), exact[name]))
        line |= {"ms": times[name], "MiB": peak_mib(name, loss, pairs, width, kind, device)}
        if rate and name in ("kontrast", "plain torch"):
            line["captured ms"] = captured(loss, z1, z2, budget)
            line["share"] = 6e3 * (2 * pairs) ** 2 * width / (line["captured ms"] * rate)  # type: ignore[operator]
        lines.append(line)
    return lines


def compile_kernels(kinds: list[torch.dtype], widths: list[int], sizes: list[int]) -> None:
    """Compile the Triton kernels of all cases in parallel; the processes share Triton's cache on disk."""
    cases = [(kind, width, sizes) for kind in kinds for width in widths]
    with multiprocessing.get_context("spawn").Pool(min(len(cases), max(2, (os.cpu_count() or 2) - 2))) as pool:
        pool.map(compile_case, cases, chunksize=1)


def compile_case(case: tuple[torch.dtype, int, list[int]]) -> None:
    kind, width, sizes = case
    for pairs in {min(pairs, 2100) for pairs in sizes}:
        step(contenders()["kontrast"], *views(pairs, width, kind, "cuda"))


def show(line: dict[str, object], lines: list[dict[str, object]]) -> None:
    same = ("type", "width", "pairs")
    ours = next(o for o in lines if o["loss"] == "kontrast" and all(o[key] == line[key] for key in same))
    text = f"{str(line['type'])[6:]:9}{line['width']:>6}{line['pairs']:>8} {line['loss']:24}"
    text += f"{line['value error']:9.1e}{line['gradient error']:9.1e}"
    text += f"{line['ms']:11.3f} ms{line['MiB']:10.1f} MiB"
    text += f"{line['ms'] / ours['ms']:9.2f}x time{line['MiB'] / max(ours['MiB'], 0.1):9.2f}x memory"  # type: ignore[operator]
    if "share" in line:
        text += f"   captured {line['captured ms']:.3f} ms, {line['share']:.0%} of the matrix rate"
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, shorter timings")
    parser.add_argument("--tune", action="store_true", help="time block sizes of each Triton kernel instead (CUDA)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--pairs", type=int, nargs="*", help="sizes to run")
    parser.add_argument("--widths", type=int, nargs="*", default=[128], help="widths of the rows to run")
    parser.add_argument("--type", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        loss, kind = contenders()[arguments.memory_of], getattr(torch, arguments.type)
        print(own_peak_mib(loss, arguments.pairs[0], arguments.widths[0], kind))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = [512, 4096, 32768] if device == "cuda" else [256, 512, 1024, 2048, 4096]
    sizes = arguments.pairs or (sizes[::2] if arguments.quick else sizes)
    kinds = [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32]
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"NT-Xent, temperature {TEMPERATURE}, forward and backward; torch {torch.__version__}, {where}")

    def save(lines: list[dict[str, object]]) -> None:
        if arguments.json:
            facts = {"device": where, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
            arguments.json.write_text(json.dumps({**facts, "lines": lines}, indent=1))

    if arguments.tune:
        from _kernel_shapes import tune

        save(tune(2 * max(sizes)))
    else:
        race(sizes, arguments.widths, kinds, device, 0.1 if arguments.quick else 1.0, save)


if __name__ == "__main__":
    main()
