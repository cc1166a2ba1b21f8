"""Say where the time of one call of an objective goes, forward and backward: the host, or the device's operations.

    python benchmarks/profile_calls.py [NAME ...] [--pairs 256] [--width 128] [--type float32] [--operations]

A NAME may have arguments, as in `info-nce:symmetric=true,temperature=0.07`. --operations lists the device's operations.

`ms` waits for the device after each call; `host` is how long Python takes to return; the device's operations are those
of one call and the sum of their times. A call whose device time is far below `host` is as slow as its launches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

import torch
from kernels import milliseconds, plain, views
from needed_inputs import needed_inputs
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kontrast.objectives import OBJECTIVES, Objective, objective

CALLS = 50


def built(text: str) -> Objective:
    """Return the objective of a name with arguments."""
    name, _, rest = text.partition(":")
    return objective(
        name, **{key: json.loads(value) for key, value in (one.split("=") for one in rest.split(",") if one)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=["nt-xent", *(name for name in OBJECTIVES if name != "nt-xent")])
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--type", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--operations", action="store_true", help="list the device's operations, the longest first")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/profile_calls.py needs a CUDA device: it counts launches")
    print(f"{'objective':<20}{'ms':>9}{'host ms':>10}{'operations':>12}{'device us':>11}")
    for name in ["plain torch", *given.names]:
        z1, z2 = views(given.pairs, given.width, getattr(torch, given.type), "cuda")
        loss = plain if name == "plain torch" else built(name).cuda()
        extra = {} if name == "plain torch" else needed_inputs(loss, given.pairs, given.width, "cuda")

        def step(z1=z1, z2=z2, loss=loss, extra=extra) -> None:
            z1.grad = z2.grad = None
            loss(z1, z2, **extra).backward()

        for _ in range(5):
            step()
        waited = milliseconds(step, "cuda", 0.5)
        started = time.perf_counter()
        for _ in range(CALLS):
            step()
        host = 1e3 * (time.perf_counter() - started) / CALLS
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            step()
            torch.cuda.synchronize()
        events = [event for event in found.events() if event.device_type == DeviceType.CUDA]
        busy = sum(event.device_time for event in events)
        print(f"{name:<20}{waited:>9.3f}{host:>10.3f}{len(events):>12}{busy:>11.0f}", flush=True)
        if given.operations:
            times: Counter[str] = Counter()
            for event in events:
                times[event.name] += event.device_time
            for operation, time_of_it in times.most_common():
                print(f"    {time_of_it:>10.0f} us  {operation[:90]}")


if __name__ == "__main__":
    main()
