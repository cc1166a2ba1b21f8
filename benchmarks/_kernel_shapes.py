"""Find the fastest block sizes, warps and stages of each Triton kernel; print a table, fastest first.

Used by `python benchmarks/kernels.py --tune`. Variants are compiled by several processes first, then timed one by one.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os

import torch

from kontrast.kernels.triton_launch import triton_backward, triton_forward
from kontrast.kernels.triton_operands import NARROW, WIDE, Shape

HALF, SINGLE = torch.bfloat16, torch.float32
VARIANTS: dict[tuple[str, torch.dtype], list[Shape]] = {
    ("triangle", HALF): [
        Shape(128, 128, 8, 3), Shape(128, 128, 8, 2), Shape(128, 64, 4, 3), Shape(64, 128, 4, 3), Shape(64, 64, 4, 4),
        Shape(128, 64, 8, 3), Shape(64, 128, 4, 2), Shape(128, 128, 4, 3),
    ],
    ("gradient", HALF): [
        Shape(128, 128, 8, 3), Shape(128, 128, 8, 2), Shape(128, 64, 4, 3), Shape(128, 64, 4, 4), Shape(64, 128, 4, 2),
        Shape(64, 64, 4, 3), Shape(128, 64, 8, 3), Shape(128, 128, 4, 2), Shape(128, 256, 8, 2), Shape(256, 64, 8, 3),
    ],
    ("rows", HALF): [
        Shape(128, 128, 8, 3), Shape(128, 128, 4, 3), Shape(128, 64, 4, 3), Shape(64, 128, 4, 3), Shape(128, 256, 8, 2),
    ],
    ("triangle", SINGLE): [
        Shape(64, 64, 4, 2), Shape(64, 64, 4, 3), Shape(64, 128, 4, 2), Shape(64, 128, 8, 2), Shape(128, 32, 4, 2),
    ],
    ("gradient", SINGLE): [
        Shape(64, 64, 4, 2), Shape(64, 64, 4, 3), Shape(128, 64, 8, 2), Shape(64, 128, 4, 2), Shape(128, 32, 8, 2),
        Shape(64, 32, 4, 3),
    ],
    ("rows", SINGLE): [Shape(64, 64, 4, 2), Shape(128, 64, 8, 2), Shape(64, 128, 4, 2), Shape(64, 32, 4, 2)],
}  # fmt: skip
WIDE_VARIANTS = {
    HALF: [
        Shape(128, 128, 4, 3, 64), Shape(128, 128, 8, 3, 64), Shape(128, 128, 4, 4, 64), Shape(128, 128, 8, 4, 64),
        Shape(128, 256, 8, 3, 64), Shape(256, 128, 8, 3, 64), Shape(128, 128, 4, 2, 128),
    ],
    SINGLE: [
        Shape(128, 128, 8, 3, 32), Shape(128, 128, 8, 2, 32), Shape(128, 128, 8, 2, 64), Shape(128, 64, 4, 3, 32),
        Shape(128, 64, 4, 2, 64), Shape(64, 128, 4, 3, 32),
    ],
}  # fmt: skip
for kernel in ("rows", "both", "tiles"):
    for kind, shapes in WIDE_VARIANTS.items():
        # The triangle of `both` needs square tiles.
        VARIANTS[f"wide {kernel}", kind] = [s for s in shapes if kernel != "both" or s.rows == s.columns]
WIDTHS = {False: 128, True: 512}


def table_of(kernel: str) -> dict[int, Shape]:
    """Return the entries of a kernel by bytes per number."""
    return WIDE[kernel.removeprefix("wide ")] if kernel.startswith("wide") else NARROW[kernel]


def work(kernel: str, kind: torch.dtype, rows: int):
    """Return a call that spends its time in one kernel: the statistics or their gradient at scale 10, two views."""
    wide, kernel = kernel.startswith("wide"), kernel.removeprefix("wide ")
    rows, width = rows // (4 if wide else 1), WIDTHS[wide]
    z = torch.nn.functional.normalize(torch.randn(rows, width, device="cuda"), dim=1).to(kind)
    ids = torch.arange(rows // 2, device="cuda").repeat(2)
    lse, gradient = torch.full((1, rows), 11.0, device="cuda"), torch.full((1, rows), 1 / rows, device="cuda")
    if kernel in ("gradient", "tiles"):
        arguments = (gradient, None, z, None, ids, None, lse, lse[:, :0], [10.0], False, True, False, True)
        return lambda: triton_backward(*arguments)
    keys, key_ids = (z, ids) if kernel == "rows" else (None, None)
    return lambda: triton_forward(z, keys, ids, key_ids, [10.0], False, True)


def compile_one(case: tuple[str, torch.dtype, Shape]) -> str:
    kernel, kind, shape = case
    table_of(kernel)[kind.itemsize] = shape
    try:
        work(kernel, kind, 2**14)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{kernel} {shape}: {type(error).__name__} {str(error)[:120]}"
    return ""


def milliseconds(call, repeats: int = 5) -> float:
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[len(times) // 2]


def tune(rows: int) -> list[dict[str, object]]:
    cases = [(kernel, kind, shape) for (kernel, kind), shapes in VARIANTS.items() for shape in shapes]
    with multiprocessing.get_context("spawn").Pool(min(len(cases), max(2, (os.cpu_count() or 2) - 2))) as pool:
        failures = pool.map(compile_one, cases, chunksize=1)
    lines = []
    for (kernel, kind), shapes in VARIANTS.items():
        table = table_of(kernel)
        before = table[kind.itemsize]
        for shape in shapes:
            if failures[cases.index((kernel, kind, shape))]:
                print(failures[cases.index((kernel, kind, shape))])
                continue
            table[kind.itemsize] = shape
            ms = milliseconds(work(kernel, kind, rows))
            lines.append({"kernel": kernel, "type": str(kind), "shape": str(shape), "ms": ms})
        table[kind.itemsize] = before
    for line in sorted(lines, key=lambda line: (line["kernel"], line["type"], line["ms"])):
        print(f"{line['kernel']:11} {line['type']:15} {line['ms']:8.3f} ms  {line['shape']}")
    return lines
