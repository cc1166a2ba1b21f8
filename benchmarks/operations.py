"""Count the torch operations of one forward and one backward pass of each objective; on a GPU each costs host time.

An operation is counted if it computes or copies; views, and memory that is only reserved, are free. Where CUDA has a
Triton kernel instead (row statistics of large batches, SWD's draws), the count on the CPU is an upper bound.

    python benchmarks/operations.py [--pairs 256] [--width 128] [--list] [NAME ...]
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
from needed_inputs import needed_inputs
from torch.utils._python_dispatch import TorchDispatchMode

from kontrast.objectives import OBJECTIVES, Objective, objective

FREE = {"promote_types", "_unsafe_view", "detach", "alias", "lift_fresh"}
FREE |= {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class OperationCounter(TorchDispatchMode):
    """Count the operations that run inside the `with` block, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in FREE:
            self.counts[name] += 1
        return func(*args, **kwargs or {})


def count_operations(loss: Objective, z: torch.Tensor) -> tuple[Counter[str], Counter[str]]:
    """Return the operations of the forward and of the backward pass, after a first call that may set things up."""
    z, given = z.clone().requires_grad_(), needed_inputs(loss, *z.shape[1:])
    loss(z, **given).backward()
    z.grad = None
    with OperationCounter() as forward:
        value = loss(z, **given)
    with OperationCounter() as backward:
        value.backward()
    return forward.counts, backward.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="objectives; all by default")
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--list", action="store_true", help="list the operations too")
    given = parser.parse_args()
    z = torch.randn(2, given.pairs, given.width, generator=torch.Generator().manual_seed(0))
    print(f"{'objective':20} forward backward  total")
    for name in given.names or sorted(OBJECTIVES):
        forward, backward = count_operations(objective(name), z)
        print(f"{name:20} {forward.total():7} {backward.total():8} {forward.total() + backward.total():6}")
        if given.list:
            print("   ", dict(forward), "\n   ", dict(backward))


if __name__ == "__main__":
    main()
