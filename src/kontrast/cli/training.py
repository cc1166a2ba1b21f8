"""The command `pretrain`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kontrast import plugins
from kontrast.cli.output import (
    Device,
    Engine,
    FollowLinks,
    Json,
    MaxBad,
    Workers,
    emit,
    say,
    split_arguments,
    write_page,
)
from kontrast.errors import EnvironmentFault
from kontrast.training.signals import StopSignals

if TYPE_CHECKING:
    from kontrast.runs.probe import ProbeResults
    from kontrast.runs.run import Run


def pretrain(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[DATA] [key=value ...]", show_default=False)] = None,
    recipe: Annotated[str, typer.Option(help="A name from `kontrast recipes`, or a .toml file.")] = "",
    from_: Annotated[
        str | None, typer.Option("--from", help="Weights to start from: a run, a file, timm:NAME or hf://OWNER/NAME.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Plan the epochs so that all is done in this time.")] = None,
    out: Annotated[str | None, typer.Option(help="The run folder; default: a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    accept_data_change: Annotated[bool, typer.Option(help="Resume even if the images have changed.")] = False,
    device: Device = "auto",
    on_nan: Annotated[str, typer.Option(help="If the loss is not finite: stop, or skip up to 10 steps.")] = "stop",
    max_bad: MaxBad = None,
    allow_small: Annotated[bool, typer.Option("--allow-small", help="Shrink the batch if images are few.")] = False,
    follow_links: FollowLinks = False,
    probes: Annotated[bool, typer.Option(help="Probe the encoder after training.")] = True,
    engine: Engine = "local",
    workers: Workers = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="ray: how often lost workers are restarted (default 3).", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Train an encoder on DATA, without labels.

    DATA is a folder of images, a named data set, shards or a packed store. Default: the embedded digits.
    """
    from kontrast import distributed
    from kontrast.engines.ray_cluster import check_engine
    from kontrast.engines.ray_ranks import pretrain_on_ray
    from kontrast.training.pretrain import choose_out
    from kontrast.training.time_budget import process_start

    data, overrides = split_arguments(arguments)
    overrides += data_overrides(max_bad, allow_small, follow_links)
    train = partial(
        train_and_report, data, recipe=recipe or None, overrides=overrides, from_=from_, resume=resume,
        accept_data_change=accept_data_change, device=device, on_nan=on_nan, minutes=minutes, engine=engine,
        probed=probes,
    )  # fmt: skip
    began = process_start()
    if check_engine(engine, workers, max_restarts):
        place = choose_out(data, recipe or None, overrides, out, resume)
        result = pretrain_on_ray(
            train, place, resume=resume, workers=workers, device=device, max_restarts=max_restarts, began=began,
            to_terminal=True, say=say,
        )  # fmt: skip
    else:
        join_ranks()
        try:
            result = train(out=out, began=began, say=say)
        finally:
            distributed.finalize()
    if result is not None:
        emit(*result, as_json)


def train_and_report(data: str | None, **arguments: Any) -> tuple[dict[str, Any], list[str]] | None:
    """Train, probe the encoder and write the report; return what the command prints, or None except on the first
    rank."""
    from kontrast import distributed
    from kontrast.runs.run import Run
    from kontrast.training.pretrain import pretrain as train

    run = Run(train(data, **arguments))
    if not distributed.is_main():
        return None
    results, page = probe_and_report(run, arguments["probed"], arguments["device"], arguments["say"])
    facts = {"run": str(run.path), "report": str(page), "probes": [r.to_dict() for r in results or []]}
    table = str(results).splitlines() if results else []
    return facts, [*table, f"run     {run.path}", f"report  {page}"]


def data_overrides(max_bad: float | None, allow_small: bool, follow_links: bool) -> list[str]:
    """Turn the options about images into settings, so that the stored recipe has them."""
    settings = [] if max_bad is None else [f"data.max_bad={max_bad}"]
    return settings + ["data.allow_small=true"] * allow_small + ["data.follow_links=true"] * follow_links


def probe_and_report(
    run: Run, probes: bool, device: str, say: Callable[[str], None]
) -> tuple[ProbeResults | None, Path]:
    """Probe a finished run, unless `--no-probes` was given, and write its report."""
    from kontrast.runs.probe import probe

    program = plugins.command_start()
    again = " && ".join(shlex.join([*program, verb, str(run.path)]) for verb in ("probe", "report"))
    with StopSignals(f"stopped before the probes were done; continue with: {again}"):
        results = probe(run, device=device, say=say) if probes else None
        return results, write_page([run.path], run.path / "report.html")


def join_ranks() -> None:
    """Join the process group if torchrun started this process."""
    from kontrast import distributed

    try:
        distributed.initialize()
    except ValueError as error:
        names = "WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        raise EnvironmentFault(f"can't join the ranks: {error}; start with torchrun, or unset {names}") from None


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(pretrain)
