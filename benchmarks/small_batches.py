"""Time NT-Xent of small batches with s computed by the kernel and with s stored, beside plain torch's.

    python benchmarks/small_batches.py [--type float32] [--pairs 64 128 256 512 1024] [--widths 64 128]

The last line is the number of rows up to which the kernel is the better way: each call from Python takes at least 3%
less time, and a captured one at most 0.8 of plain torch's. It belongs into MOST_ROWS of kontrast.kernels.small_batch.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from kernels import captured, milliseconds_in_turn, plain, step, views

from kontrast.kernels import small_batch
from kontrast.objectives import objective

LOSS = objective("nt-xent", temperature=0.1)


def store(kind: torch.dtype, stored: bool) -> None:
    """Choose one of the two ways for all batches of a type."""
    small_batch.MOST_ROWS[kind.itemsize] = 0 if stored else 2**20


def chosen_step(stored: bool, z: tuple[torch.Tensor, torch.Tensor]) -> None:
    store(z[0].dtype, stored)
    step(LOSS, *z)


def measure(pairs: int, width: int, kind: torch.dtype) -> tuple[list[float], list[float]]:
    """Return milliseconds called from Python and captured, each of s stored, s in the kernel, and plain torch."""
    z = views(pairs, width, kind, "cuda")
    calls = [partial(chosen_step, True, z), partial(chosen_step, False, z), partial(step, plain, *z)]
    called, replayed = milliseconds_in_turn(calls, "cuda", 0.25), []
    for stored in (True, False):
        store(kind, stored)
        replayed.append(captured(LOSS, *z, 0.1))
    return called, [*replayed, captured(plain, *z, 0.1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--type", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/small_batches.py needs a CUDA device: it times launches")
    kind, rows, better = getattr(torch, given.type), 0, True
    print(f"{'pairs':>6}{'width':>7}   called: stored, kernel, plain torch   captured: the same, ms")
    for pairs in sorted(given.pairs):
        for width in given.widths:
            called, replayed = measure(pairs, width, kind)
            print(f"{pairs:>6}{width:>7}   " + "".join(f"{ms:8.3f}" for ms in called + replayed), flush=True)
            better = better and called[1] < 0.97 * called[0] and replayed[1] < 0.8 * replayed[2]
        rows = 2 * pairs if better else rows
    print(f"kernel up to {rows} rows of {given.type}")


if __name__ == "__main__":
    main()
