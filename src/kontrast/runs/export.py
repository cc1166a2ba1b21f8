"""Write a run's encoder for other programs: one file with a JSON card that describes it, or a folder with a card in
Markdown for timm, torchvision and the Hugging Face Hub.

images [N,C,h,w] float32, normalized as the card says -> features [N,F].
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.config.recipe import to_tree
from kontrast.data import ImageSet
from kontrast.detection.backbones import stage_names
from kontrast.detection.detectron2_names import PREFIXES, detectron2_names
from kontrast.errors import CheckpointError, DataError, EnvironmentFault, NumbersError, UsageError, printable
from kontrast.files import disk_faults, write_atomic, write_json
from kontrast.networks import Encoder
from kontrast.registry import nearest
from kontrast.runs import model_folder
from kontrast.runs.image_stream import open_stream
from kontrast.runs.probe import read_probes
from kontrast.runs.run import Run, open_run
from kontrast.training import checkpoints
from kontrast.training.run_folder import result_prefix, sha256, weights_path
from kontrast.training.weight_files import safetensors_bytes

FORMATS = {"safetensors": ".safetensors", "onnx": ".onnx", "detectron2": ".detectron2.safetensors"}
"""The formats of one file, and how its name ends; those of a folder are in `model_folder.FORMATS`."""
MOST_IMAGES = 32
"""An ONNX file must agree with torch on at most so many real images."""
TOLERANCE = 1e-3
"""How far an ONNX file may be from torch, as a share of the largest feature."""
INSTEAD = "not written; export to safetensors instead"
READ = "a shorter side over {0} px is first resized to {0}, {1}; a JPEG from the next larger scale of its decoder"
SCALED = "first (value - low) / (high - low) of each channel, clamped to 0 and 1"
THEN = ", then / 255"
BOTH = "and a longer side that is then over {0} px to {0}, in one step with Pillow's Hamming window"


@dataclass(frozen=True)
class ExportResult:
    """The exported file or folder, its card, the number of features, and the largest difference of ONNX from torch on
    real images, as a share of the largest feature (None for safetensors, which holds the exact weights)."""

    path: Path
    card: Path
    width: int
    difference: float | None

    def __str__(self) -> str:
        checked = ""
        if self.difference is not None:
            checked = f"largest difference from torch: {self.difference:.3g} of the largest feature\n"
        return f"{checked}out     {printable(str(self.path))}\ncard    {printable(str(self.card))}"

    def to_dict(self) -> dict[str, Any]:
        paths = {"out": str(self.path), "card": str(self.card)}
        return {**paths, "width": self.width, "max_difference": self.difference}


def export(
    run: str | os.PathLike[str],
    format: str = "safetensors",
    out: str | os.PathLike[str] | None = None,
    *,
    data: str | None = None,
    with_head: bool = False,
    license: str = "",
    allow_paths: bool = False,
) -> ExportResult:
    """Write the encoder for other programs, with a card that describes it.

    An ONNX file is run on real images and compared with torch; one that disagrees is not written. The formats timm,
    torchvision and hub are folders of model.safetensors, config.json and README.md, a card with the data, the recipe
    and the accuracies. `timm.create_model("local-dir:FOLDER", pretrained=True)` and torchvision's model of the same
    name load them, if the libraries have an equal model; that of the hub can also be loaded by `kontrast.load`.

    Args:
        run: A run folder or a `kontrast.Run`.
        format: "safetensors" (default), "onnx", or "detectron2": the tensors of a ResNet under detectron2's names, in a
            safetensors file; "timm", "torchvision", or "hub" for the Hugging Face Hub.
        out: The file or folder to write; default: export/encoder.FORMAT, or export/FORMAT, in the run folder. For timm
            and torchvision, a name that ends in .safetensors gives a file, with its configuration and card beside it.
        data: The images to compare ONNX with torch on; default: the run's own.
        with_head: Add what the newest checkpoint has besides the encoder, for safetensors alone: the projection head,
            the predictor and the prototypes, under names that begin with "kontrast.".
        license: Of the weights, for timm, torchvision and hub: an identifier such as "cc-by-4.0".
        allow_paths: Keep absolute paths of this machine in a folder, which is made to be published; default: no.

    Returns:
        The paths of the file or folder and its card, the number of features, and ONNX's largest difference from torch.

    Example:
        >>> import kontrast
        >>> result = kontrast.export("runs/digits", out="encoder.safetensors")
        >>> print(result)
        out     encoder.safetensors
        card    encoder.safetensors.json
    """
    run = open_run(run)
    if format not in (*FORMATS, *model_folder.FORMATS):
        raise UsageError(f"unknown format {format!r}: {nearest(format, (*FORMATS, *model_folder.FORMATS))}")
    if with_head and format != "safetensors":
        raise UsageError(f"--with-head needs --format safetensors: with {format} there is the encoder alone")
    if format in model_folder.FORMATS:
        return export_model(run, format, out, license, allow_paths)
    if license or allow_paths:
        raise UsageError(f"--license and --allow-paths are for --format timm, torchvision and hub, not for {format}")
    out = Path(out) if out is not None else run.path / "export" / f"encoder{FORMATS[format]}"
    ending = f".{FORMATS[format].rpartition('.')[2]}"
    if not out.name.endswith(ending) or out.resolve() == weights_path(run.path).resolve():
        raise UsageError(f"--out {out}: give a path that ends in {ending} and is not the run's own file")
    encoder = run.encoder("cpu")
    card = describe(run, encoder)
    difference = None
    if format == "detectron2":
        stage_names(encoder)  # raises if it is no ResNet
        card["detectron2"] = {"prefixes": PREFIXES, "stride_in_1x1": False, "format": "RGB"}
        content = safetensors_bytes(detectron2_names(encoder.state_dict()), card)
    elif format == "safetensors":
        content = safetensors_bytes(encoder.state_dict() | (beside_encoder(run) if with_head else {}), card)
    else:
        images = real_images(run, data)
        content, difference = checked_onnx(run, encoder, images)
        card["onnx"] = {"max_difference": difference, "images": len(images), "tolerance": TOLERANCE}
    with disk_faults(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, content)
    card |= {"format": format, "file": out.name, "sha256": sha256(content)}
    card_path = out.with_name(f"{out.name}.json")
    write_json(card_path, card)
    return ExportResult(out, card_path, encoder.width, difference)


def export_model(
    run: Run, format: str, out: str | os.PathLike[str] | None, license: str, allow_paths: bool
) -> ExportResult:
    """Write a folder for timm, torchvision or the hub, or for the first two a file with others beside it."""
    out = Path(out) if out is not None else run.path / "export" / format
    alone = out.suffix == ".safetensors"
    if alone and format == "hub":
        raise UsageError(f"--out {out}: --format hub writes a folder; give its path")
    encoder, weights = run.encoder("cpu"), out.name if alone else model_folder.WEIGHTS
    title, named = run.path.resolve().name, {"place": out.resolve().name, "weights": weights}
    files = model_folder.model_files(
        run, encoder, describe(run, encoder), format, license=license, allow_paths=allow_paths, title=title, **named
    )
    if alone:
        model_folder.write_beside(out, files)
        return ExportResult(out, model_folder.files_beside(out)[model_folder.CARD], encoder.width, None)
    model_folder.write_folder(out, files)
    return ExportResult(out, out / model_folder.CARD, encoder.width, None)


def describe(run: Run, encoder: Encoder) -> dict[str, Any]:
    """Return the card: how the encoder was trained, its input and output, and its probe results."""
    policy, info, data = run.transform().policies[0], run.info, run.recipe.data
    how = BOTH.format(data.longest) if data.longest else "bicubic"
    deep = {"low": list(policy.low), "high": list(policy.high)} if policy.low and policy.high else {}
    return {
        "version": 1,
        "what": "an image encoder trained without labels by kontrast",
        "encoder": {"name": run.recipe.encoder.name, **run.recipe.encoder.arguments},
        "width": encoder.width,
        "input": {
            "channels": run.channels,
            "size": run.recipe.views.size,
            "layout": "NCHW float32",
            **({"read": READ.format(data.size, how)} if data.size else {}),
            **({"values": SCALED, "dtype": run.limits.made.dtype} if deep else {}),
            "resize": f"shorter side and center crop, {policy.interpolation} with antialiasing{'' if deep else THEN}",
            "crop": f"the middle {policy.center_fraction:g} of the shorter side",
            "interpolation": policy.interpolation,
            "center_fraction": policy.center_fraction,
        },
        "normalisation": {"mean": list(policy.mean), "std": list(policy.std), **deep},
        "data": info["data"],
        "trained": {key: info[key] for key in ("device", "steps", "seconds", "finished") if key in info},
        "versions": {key: info[key] for key in ("kontrast", "torch", "python") if key in info},
        "exported_with": checkpoints.versions(),
        "recipe": to_tree(run.recipe),
        "fingerprint": info.get("fingerprint", ""),
        "probes": read_probes(run.path / "probes.json"),
    }


def beside_encoder(run: Run) -> dict[str, Tensor]:
    """Return the head, predictor and prototypes of the newest checkpoint, under names that begin with "kontrast."."""
    newest = checkpoints.newest(run.path / "checkpoints")
    if newest is None:
        raise CheckpointError(f"--with-head: {run.path} has no checkpoint left, and encoder.safetensors has no head")
    parts = {"head": f"{result_prefix(run.recipe)}.head", "predictor": "learner.predictor"}
    parts["prototypes"] = "learner.prototypes"
    found = {name: checkpoints.under(prefix, newest[0]) for name, prefix in parts.items()}
    return {f"kontrast.{name}.{key}": tensor for name, tensors in found.items() for key, tensor in tensors.items()}


def real_images(run: Run, data: str | None) -> ImageSet:
    """Return a few of the run's own images, or of `data`, to compare ONNX with torch on."""
    try:
        if data is None:
            return run.data("train").first(MOST_IMAGES)
        batch = next(iter(open_stream(run, data).batches(0, 1)))
        if batch.bad and not batch.ids:
            raise DataError(f"can't read {batch.bad[0][0]} ({batch.bad[0][1]})")
        return batch.images.first(MOST_IMAGES)
    except DataError as error:
        raise DataError(f"ONNX is compared with torch on real images: {error}; give others with --data DIR") from None


def checked_onnx(run: Run, network: nn.Module, images: ImageSet) -> tuple[bytes, float]:
    """Return the content of the ONNX file, for any batch size, and its largest difference from torch."""
    view, everyone = run.transform(), torch.arange(len(images))
    parts = [view(pixels, positions, sizes)[0] for positions, pixels, sizes in images.iter_chunks(everyone)]
    x = torch.cat(parts).contiguous()
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise EnvironmentFault(f"ONNX needs {error.name}: pip install onnx onnxscript onnxruntime") from None
    try:
        content = onnx_bytes(network, x[:2])
        difference = max(onnx_difference(network, content, batch) for batch in (x, x[:1]))
    except Exception as error:  # exporter and runtime have many exception types, with many lines
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        raise NumbersError(f"torch or onnxruntime can't make the ONNX file ({reason}): {INSTEAD}") from error
    if not difference <= TOLERANCE:
        share = f"{difference:.3g} of the largest feature on {len(x)} images, more than {TOLERANCE:g}"
        problem = f"differs from torch by {share}"
        raise NumbersError(f"the ONNX file {problem}: {INSTEAD}")
    return content, difference


def onnx_bytes(network: nn.Module, x: Tensor) -> bytes:
    """Return the content of an ONNX file that takes any number of images like `x`; `network.gives` names its output."""
    shapes = ({0: torch.export.Dim("images", min=1)},)
    with silence_exporter():
        # strict=True: otherwise torch takes len(x), and so the batch size, for a constant.
        program = torch.export.export(network, (x,), dynamic_shapes=shapes, strict=True)
        names: Any = {"input_names": ["images"], "output_names": [getattr(network, "gives", "features")]}
        made = torch.onnx.export(program, (x,), dynamo=True, verbose=False, **names)
        return made.model_proto.SerializeToString()  # type: ignore[union-attr]


def onnx_difference(encoder: nn.Module, content: bytes, x: Tensor) -> float:
    """Return the largest difference as a share of the largest feature, NaN if either output has one (no tolerance
    admits it). Rounding errors grow with the features, so an absolute limit would be too strict or too loose."""
    import onnxruntime

    with torch.inference_mode():
        expected = encoder(x)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    given = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    return relative_difference(given, expected)


def relative_difference(given: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors as a share of the largest expected value."""
    difference, largest = (given - expected).abs().max().item(), expected.abs().max().item()
    return difference / largest if largest else difference


@contextlib.contextmanager
def silence_exporter() -> Iterator[None]:
    """Keep the exporter's progress and deprecation messages out of the command's output."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
