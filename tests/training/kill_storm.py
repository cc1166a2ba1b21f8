"""A zygote: imports torch once, forks a run, kills it at a random moment, forks its resumption, and so on to the end.

    python kill_storm.py FOLDER KILLS SEED override ...      prints one JSON line

Every second kill waits for a checkpoint that is being written and falls inside it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from kontrast.training.start import pretrain

torch.set_num_threads(1)


def train(out: Path, overrides: list[str]) -> None:
    begun = (out / "recipe.toml").exists()
    pretrain(
        recipe=None if begun else "quickstart",
        overrides=[] if begun else overrides,
        out=out,
        resume=begun,
        device="cpu",
        say=lambda _: None,
    )


def fork(out: Path, overrides: list[str]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(out, overrides)
            code = 0
        finally:
            os._exit(code)
    return child


def ended(child: int) -> bool:
    found, status = os.waitpid(child, os.WNOHANG)
    assert not found or status == 0, f"a run ended with {status}"
    return bool(found)


def kill(child: int, out: Path, delay: float, in_save: bool) -> bool:
    """Kill after `delay` seconds, or then as soon as a checkpoint is half written; False where it ended before."""
    due = time.monotonic() + delay
    while time.monotonic() < due or (in_save and not list((out / "checkpoints").glob(".tmp-*"))):
        if ended(child):
            return False
        time.sleep(0.0003)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def storm(folder: Path, kills: int, seed: int, overrides: list[str]) -> dict[str, float]:
    start = time.monotonic()
    train(folder / "whole", overrides)  # imports happen here, so its time says little
    begin = time.monotonic()
    assert os.waitpid(fork(folder / "again", overrides), 0)[1] == 0
    seconds = time.monotonic() - begin
    chance, out, survived, torn = random.Random(seed), folder / "killed-0", 0, 0
    while survived < kills:
        child = fork(out, overrides)
        if kill(child, out, chance.uniform(0, 0.7) * seconds, in_save=survived % 2 == 1):
            survived += 1
            torn += bool(list((out / "checkpoints").glob(".tmp-*")))
        else:  # the run was done before the kill: begin another
            out = folder / f"killed-{survived}"
    assert os.waitpid(fork(out, overrides), 0)[1] == 0
    return {"kills": survived, "torn": torn, "seconds": time.monotonic() - start}


if __name__ == "__main__":
    print(json.dumps(storm(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])))
