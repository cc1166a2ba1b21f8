"""The command. It answers `--help` without importing torch: every command imports what it needs when it runs."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kontrast import __version__, cli_compare, cli_reproduce, cli_studies, own_code
from kontrast.registry import EnvironmentFault, KontrastError, UsageError, refuse_pickle
from kontrast.terminal import (
    Device,
    FloatRange,
    Json,
    MaxBad,
    emit,
    fail,
    keep_streams,
    say,
    split_arguments,
    two_numbers,
    write_page,
)
from kontrast.training.stopping import StopWatch

if TYPE_CHECKING:
    from kontrast.probes import ProbeResult
    from kontrast.training.run import Run

app = typer.Typer(
    name="kontrast",
    help="Learn image representations without labels by contrast, and see what they learned. With --debug anywhere, an "
    "error shows where it came from.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FollowLinks = Annotated[bool, typer.Option("--follow-links", help="Follow links in folders.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="[DATA] [key=value ...]", show_default=False)]


@app.command()
def pretrain(
    arguments: Arguments = None,
    recipe: Annotated[str, typer.Option(help="A name from `kontrast recipes`, or a .toml file.")] = "",
    out: Annotated[str | None, typer.Option(help="The run folder; default: a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    accept_data_change: Annotated[bool, typer.Option(help="Resume although the images changed.")] = False,
    device: Device = "auto",
    on_nan: Annotated[str, typer.Option(help="At a loss that is not finite: stop, or skip up to 10 steps.")] = "stop",
    max_bad: MaxBad = None,
    allow_small: Annotated[bool, typer.Option("--allow-small", help="Shrink the batch to few images.")] = False,
    follow_links: FollowLinks = False,
    probes: Annotated[bool, typer.Option(help="Probe and report when training ends.")] = True,
    as_json: Json = False,
) -> None:
    """Train an encoder on DATA (a folder, a named set, shards or a store; default: the embedded digits)."""
    from kontrast import distributed, training

    data, overrides = split_arguments(arguments)
    overrides += data_overrides(max_bad, allow_small, follow_links)
    join_ranks()
    try:
        run = training.pretrain(
            data,
            recipe=recipe or None,
            overrides=overrides,
            out=out,
            resume=resume,
            accept_data_change=accept_data_change,
            device=device,
            on_nan=on_nan,
            say=say,
        )
        if not distributed.is_main():
            return
        results, page = probed(run, probes, device)
    finally:
        distributed.finalize()
    facts = {"run": str(run.path), "report": str(page), "probes": [r.to_dict() for r in results]}
    emit(facts, [*training.result_table(results), f"run     {run.path}", f"report  {page}"], as_json)


def data_overrides(max_bad: float | None, allow_small: bool, follow_links: bool) -> list[str]:
    """The options about images as the settings they stand for, so that the recipe that is kept has them."""
    chosen = [] if max_bad is None else [f"data.max_bad={max_bad}"]
    return chosen + ["data.allow_small=true"] * allow_small + ["data.follow_links=true"] * follow_links


def probed(run: Run, probes: bool, device: str) -> tuple[list[ProbeResult], Path]:
    """A finished run's probes, if they are wanted, and its report."""
    from kontrast import training

    words = own_code.program()
    again = " && ".join(shlex.join([*words, word, str(run.path)]) for word in ("probe", "report"))
    with StopWatch(f"stopped before the probes were done; go on with: {again}"):
        results = training.evaluate(run, device=device, say=say) if probes else []
        return results, write_page([run.path], run.path / "report.html")


def join_ranks() -> None:
    from kontrast import distributed

    try:
        distributed.initialize()
    except ValueError as error:
        names = "WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        raise EnvironmentFault(f"can't join the ranks: {error}; start with torchrun, or unset {names}") from None


@app.command()
def probe(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    kind: Annotated[
        str, typer.Argument(help="knn, linear, few-shot, finetune or a protocol; default: knn and linear.")
    ] = "",
    protocol: Annotated[str, typer.Option(help="Of linear: cacr, moco, simclr, ...; a wrong one lists all.")] = "",
    cached: Annotated[
        bool, typer.Option("--cached/--augmented", help="Protocols: plain pictures once, or fresh crops every epoch.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="Times to probe, with different seeds.")] = 1,
    epochs: Annotated[int, typer.Option(help="Of fine-tuning; 0: 50.")] = 0,
    data: Annotated[str, typer.Option(help="Labelled images; default: the run's own data.")] = "",
    labels: Annotated[Path | None, typer.Option(help="A CSV with columns name,label.")] = None,
    max_bad: MaxBad = None,
    float_range: FloatRange = "",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure what the frozen encoder of RUN can do, beside raw pixels and the untrained encoder."""
    from kontrast import training
    from kontrast.training.embedding import opened

    if float_range and not data:
        raise UsageError("--float-range is for the images of --data; the run's own are read as it was trained on them")
    again = shlex.join(["kontrast", *sys.argv[1:]])
    with StopWatch(f"stopped before the probe was done; what was done is kept; go on with: {again}"):
        loaded = opened(run, two_numbers(float_range))
        results = training.evaluate(
            loaded, kind=probe_named(kind, protocol), data=data or None, labels=labels, device=device, seeds=seeds,
            cached=cached, epochs=epochs, max_bad=max_bad, say=say,
        )  # fmt: skip
    emit({"run": str(run), "probes": [r.to_dict() for r in results]}, training.result_table(results), as_json)


def probe_named(kind: str, protocol: str) -> str:
    """`linear --protocol cacr` is `cacr`."""
    if not protocol:
        return kind
    if kind not in ("", "linear"):
        raise UsageError(f"--protocol {protocol} is for the linear probe, not for {kind!r}")
    from kontrast.probes.linear import protocol_named

    return protocol_named(protocol).name


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One or more run folders.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the run's folder.")] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about one or several runs."""
    for path in runs:
        refuse_pickle(path)
        if not (path / "recipe.toml").is_file():
            raise UsageError(f"{path} is not a run folder: it has no recipe.toml")
    if out is None and len(runs) > 1:
        raise UsageError("several runs need --out PAGE.html")
    page = write_page(runs, out or runs[0] / "report.html")
    emit({"report": str(page)}, [f"report  {page}"], as_json)


@app.command()
def recipes(as_json: Json = False) -> None:
    """List the recipes, with what each is."""
    from kontrast.recipes import load_tree, recipe_names

    titles = {name: str(load_tree(name).get("title", "")) for name in recipe_names()}
    width = max(map(len, titles))
    emit(titles, [f"{name:<{width}}  {title}" for name, title in titles.items()], as_json)


@app.command()
def explain(
    name: Annotated[str, typer.Argument(help="An objective, recipe, encoder, head or view policy.")],
    as_json: Json = False,
) -> None:
    """Say what NAME is: its equation, arguments and defaults, its paper, and the recipes that use it."""
    from kontrast.explain import explain as describe

    tree, lines = describe(name)
    emit(tree, lines, as_json)


@app.command("pack")
def pack_command(
    data: Annotated[str, typer.Argument(help="A folder, a named set or shards.")],
    out: Annotated[Path, typer.Argument(help="The store to write.")],
    size: Annotated[int, typer.Option(help="Bound the shorter side to this; 0: as they are.")] = 0,
    max_bad: MaxBad = None,
    float_range: FloatRange = "",
    follow_links: FollowLinks = False,
    as_json: Json = False,
) -> None:
    """Decode DATA once into a memory-mapped store that opens at once."""
    from kontrast.data import open_data, pack
    from kontrast.training.progress import PackingBar

    with PackingBar("pack") as bar:
        chosen: dict[str, Any] = {"follow_links": follow_links, "float_range": two_numbers(float_range)}
        chosen |= {} if max_bad is None else {"max_bad": max_bad}
        stores = pack(data, out, size=size or None, progress=bar, **chosen)
    parts = {path.name: open_data(out, path.name) for path in stores}
    facts = {name: {"images": len(part), "skipped": len(part.bad)} for name, part in parts.items()}
    lines = [f"{name:<6} {f['images']:>9,} images, {f['skipped']} skipped" for name, f in facts.items()]
    emit({"store": str(out), "parts": facts}, [*lines, f"store  {out}"], as_json)


cli_studies.register(app)
cli_compare.register(app)
cli_reproduce.register(app)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            metavar="FILE.py",
            show_default=False,
            help="Import a file of your own first, which registers objectives, encoders, heads or view policies; may "
            "be repeated. KONTRAST_IMPORT names such files too.",
        ),
    ] = None,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit()
    own_code.import_files(files or [])


def is_out_of_memory(error: Exception) -> bool:
    """Of the processor's memory; the GPU's has its own line."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def run(argv: list[str]) -> int:
    """Run the command and return its exit code; every error is one line."""
    keep_streams()
    debug = "--debug" in argv
    argv = [a for a in argv if a != "--debug"] or ["--help"]
    try:
        with StopWatch("stopped; give the same command again"):
            code = app(args=argv, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KontrastError as error:
        if debug:
            traceback.print_exc()
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return fail("stopped by Ctrl-C", 130)
    except OSError as error:
        if debug:
            traceback.print_exc()
        what = f"{error.filename}: " if error.filename is not None else ""
        return fail(f"{what}{error.strerror or error}", 6)
    except SystemExit:  # typer's way to leave where the reader of --help went away (`| head`)
        return 0
    except Exception as error:
        if is_out_of_memory(error):
            return fail(f"out of memory ({error}): give less to do at once, for example a smaller encoder or batch", 6)
        usage = getattr(error, "format_message", None)  # typer's own usage errors
        if usage is not None:
            return fail(f"{usage()} (see --help)", 2) if usage() else 2
        if type(error).__name__ == "Abort":
            return fail("stopped by Ctrl-C", 130)
        if debug:
            traceback.print_exc()
            return 1
        return fail(f"unexpected {type(error).__name__}: {error} (run again with --debug and report it)", 1)


def main() -> None:
    code = run(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # all is done: a signal from here on changes nothing
        signal.signal(number, lambda *_: os._exit(code))
    sys.exit(code)
