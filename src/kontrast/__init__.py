"""Learn image representations without labels by contrast, and see what they learned.

    import kontrast

    run = kontrast.pretrain("photos")                       # train an encoder on a folder of images
    print(kontrast.probe(run))                              # measure what its features can do
    encoder = kontrast.load(run)                            # the encoder, a torch module
    loss = kontrast.objectives.NTXent(temperature=0.1)      # one loss, for your own training loop

Each verb of the command line is a function here. Rooms and functions are imported when they are first used, so that
`import kontrast` itself does not wait for torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing `typing` would delay the command's answer to a signal
if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Any

    from kontrast import data, errors, kernels, networks, objectives, optim, probes, views
    from kontrast.cli.explain import explain
    from kontrast.data.pack import pack
    from kontrast.lens import CallableRoom
    from kontrast.objectives import objective
    from kontrast.papers.reproduce import reproduce
    from kontrast.reports.report import report
    from kontrast.runs.duplicates import duplicates
    from kontrast.runs.embed import embed
    from kontrast.runs.estimator import Encoder
    from kontrast.runs.export import export
    from kontrast.runs.finetune import finetune
    from kontrast.runs.index import index
    from kontrast.runs.neighbors import neighbors
    from kontrast.runs.predict import predict
    from kontrast.runs.probe import probe
    from kontrast.runs.push import push
    from kontrast.runs.run import Run, load
    from kontrast.runs.select import select
    from kontrast.runs.transfer import transfer
    from kontrast.studies.audit.audit import audit
    from kontrast.studies.compare.compare import compare

    lens: CallableRoom

__version__ = "0.2.0"
__all__ = [
    "Encoder", "Run", "audit", "compare", "data", "duplicates", "embed", "errors", "explain", "export", "finetune",
    "index", "kernels", "lens", "load", "neighbors", "networks", "objective", "objectives", "optim", "pack", "predict",
    "pretrain", "probe", "probes", "push", "report", "reproduce", "select", "transfer", "views",
]  # fmt: skip
_MODULES = {
    "Encoder": "runs.estimator", "Run": "runs.run", "audit": "studies.audit.audit",
    "compare": "studies.compare.compare",
    "duplicates": "runs.duplicates", "embed": "runs.embed", "explain": "cli.explain", "export": "runs.export",
    "finetune": "runs.finetune", "index": "runs.index", "load": "runs.run", "neighbors": "runs.neighbors",
    "objective": "objectives", "pack": "data.pack", "predict": "runs.predict", "probe": "runs.probe",
    "push": "runs.push",
    "report": "reports.report", "reproduce": "papers.reproduce", "select": "runs.select", "transfer": "runs.transfer",
}  # fmt: skip
"""The module of each name that is not a room."""


def pretrain(
    data: Any = None,
    recipe: str | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    from_: str | os.PathLike[str] | None = None,
    resume: bool = False,
    accept_data_change: bool = False,
    device: str = "auto",
    on_nan: str = "stop",
    minutes: float | None = None,
    engine: str = "local",
    workers: int | None = None,
    max_restarts: int | None = None,
    say: Callable[[str], None] = print,
    **overrides: Any,
) -> Run:
    """Train an encoder on images without labels, and return its run.

    Args:
        data: The training images: a folder, shards, a packed store or a name such as "digits" or "cifar10"; or images
            in memory, as a uint8 tensor or array [N,C,H,W] or as a map-style dataset of images. Images in memory
            are packed into the run folder, so that the run can be resumed and probed like any other. Default: the
            recipe's own data.
        recipe: A name that `kontrast recipes` lists, or the path of a .toml file. Default: "quickstart" for the
            embedded digits, and "folder" for your own images, which chooses its settings from the images.
        out: The run folder to write. Default: a new folder under runs/.
        from_: Weights to start from: an earlier run (its folder or `Run`), a .safetensors, .pt or .pth file of a
            state dict, which is never unpickled, "timm:NAME" for timm's pretrained weights, or "hf://OWNER/NAME" for
            a model on the Hugging Face Hub that kontrast made. The encoder of a run is the default encoder then.
            Default: random weights.
        resume: Continue the run in `out` instead of starting one.
        accept_data_change: Resume even if the images have changed since the run started.
        device: "auto" (a GPU if there is one), "cpu", "mps", "cuda" or "cuda:N".
        on_nan: "stop" at the first loss or gradient that is not finite, or "skip" up to ten such steps.
        minutes: How long the training may take; the epochs are planned by the measured speed. Default: the recipe's
            epochs.
        engine: "local" for this process, or "ray" for the workers of a Ray cluster: the one that RAY_ADDRESS names, or
            one on this machine for the time of the call.
        workers: With Ray, the number of processes. Default: one per GPU of the cluster, or one without GPUs.
        max_restarts: With Ray, how often the workers are restarted if one is lost. Default: 3.
        say: Receives each line of progress. Default: print.
        **overrides: Settings that replace the recipe's, as a table (`training={"epochs": 5}`) or by dotted key
            (`**{"training.epochs": 5}`).

    Returns:
        The finished `Run`: its recipe, its encoder (`run.encoder()`) and its folder (`run.path`).

    Example:
        >>> import kontrast, tempfile
        >>> tiny = {"training": {"max_steps": 2, "batch": 16}, "encoder": {"width": 16}, "evaluation": {"every": 0}}
        >>> run = kontrast.pretrain("digits", out=tempfile.mkdtemp(), say=lambda line: None, **tiny)
        >>> run.encoder().width
        16
    """
    from functools import partial

    from kontrast.engines.ray_cluster import check_engine
    from kontrast.engines.ray_ranks import pretrain_on_ray
    from kontrast.runs.run import Run
    from kontrast.training.pretrain import choose_out
    from kontrast.training.pretrain import pretrain as train

    work = partial(
        train, data, recipe=recipe, overrides=overrides, from_=from_, resume=resume,
        accept_data_change=accept_data_change, device=device, on_nan=on_nan, minutes=minutes, engine=engine,
    )  # fmt: skip
    if not check_engine(engine, workers, max_restarts):
        return Run(work(out=out, say=say))
    place = choose_out(data, recipe, overrides, out, resume)
    return Run(pretrain_on_ray(
        work, place, resume=resume, workers=workers, device=device, max_restarts=max_restarts, say=say
    ))  # fmt: skip


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return getattr(import_module(f"kontrast.{_MODULES[name]}"), name)
    if name in __all__:
        return import_module(f"kontrast.{name}")
    raise AttributeError(f"module 'kontrast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
