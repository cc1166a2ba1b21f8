"""A run's encoder as a file for other programs: safetensors or ONNX, each with a card that says what it is.

N images [N,C,h,w], float32, normalised as the card says -> features [N,F].
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kontrast.config.recipe import to_tree
from kontrast.data import ImageSet
from kontrast.errors import DataError, EnvironmentFault, NumbersError, UsageError
from kontrast.files import atomic_path, disk_faults, write_atomic, write_json
from kontrast.networks import Encoder
from kontrast.registry import nearest
from kontrast.runs.probe import read_probes
from kontrast.runs.run import Run
from kontrast.training.checkpoints import versions

FORMATS = ("safetensors", "onnx")
CHECKED = 32
"""At most so many real images an ONNX file must agree with torch on."""
TOLERANCE = 1e-3
READ = "a shorter side over {0} px is first resized to {0}, bicubic; of a JPEG, from the next scale its decoder has"


@dataclass(frozen=True)
class Exported:
    """The file, its card beside it, and how far ONNX lies from torch (None for safetensors, which holds the bits)."""

    path: Path
    card: Path
    width: int
    difference: float | None


def export(
    run: Run,
    format: str,
    out: str | Path | None = None,
    *,
    data: str | None = None,
    say: Callable[[str], None] = print,
) -> Exported:
    """Write the encoder to `out` and a JSON card beside it; an ONNX file that disagrees with torch is not written."""
    if format not in FORMATS:
        raise UsageError(f"unknown format {format!r}: {nearest(format, FORMATS)}")
    out = Path(out) if out is not None else run.path / "export" / f"encoder.{format}"
    if out.suffix != f".{format}":
        raise UsageError(f"--out {out}: a {format} file ends in .{format}")
    if out.resolve() == (run.path / "encoder.safetensors").resolve():
        raise UsageError(f"--out {out} is the run's own file: give another")
    encoder = run.encoder("cpu")
    card = describe(run, encoder)
    with disk_faults(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    difference = None
    if format == "safetensors":
        write_atomic(out, safetensors(encoder, card))
    else:
        images = real_images(run, data)
        difference = write_onnx(run, encoder, out, images)
        card["onnx"] = {"max_difference": difference, "images": len(images), "tolerance": TOLERANCE}
    card |= {"format": format, "file": out.name, "sha256": hashlib.sha256(out.read_bytes()).hexdigest()}
    place = out.with_name(f"{out.name}.json")
    write_json(place, card)
    return Exported(out, place, encoder.width, difference)


def describe(run: Run, encoder: Encoder) -> dict[str, Any]:
    """The card: how it was made, what it takes and gives, and what it was measured to do."""
    transform = run.transform()
    policy, info, bound = transform.policies[0], run.info, run.recipe.data.size
    probes = run.path / "probes.json"
    return {
        "version": 1,
        "what": "an image encoder trained without labels by kontrast",
        "encoder": {"name": run.recipe.encoder.name, **run.recipe.encoder.arguments},
        "width": encoder.width,
        "input": {
            "channels": run.channels,
            "size": run.recipe.views.size,
            "layout": "NCHW float32",
            **({"read": READ.format(bound)} if bound else {}),
            "resize": f"shorter side and centre crop, {policy.interpolation} with antialiasing, then / 255",
            "crop": f"the middle {policy.center_fraction:g} of the shorter side",
        },
        "normalisation": {"mean": list(policy.mean), "std": list(policy.std)},
        "data": info["data"],
        "trained": {key: info[key] for key in ("device", "steps", "seconds", "finished") if key in info},
        "versions": {key: info[key] for key in ("kontrast", "torch", "python") if key in info},
        "exported_with": versions(),
        "recipe": to_tree(run.recipe),
        "fingerprint": info.get("fingerprint", ""),
        "probes": read_probes(probes) if probes.exists() else [],
    }


def safetensors(encoder: nn.Module, card: dict[str, Any]) -> bytes:
    """The weights' bytes, with the card in the header too."""
    from safetensors.torch import save

    tensors = {name: t.detach().cpu().contiguous() for name, t in encoder.state_dict().items()}
    return save(tensors, metadata={"format": "pt", "kontrast": json.dumps(card)})


def real_images(run: Run, data: str | None) -> ImageSet:
    """Some of the run's own images, or of `data`, on which ONNX is held against torch."""
    from kontrast.runs.image_stream import open_stream

    try:
        if data is None:
            return run.data("train").first(CHECKED)
        batch = next(iter(open_stream(run, data).batches(0, 1)))
        if not len(batch.images):
            raise DataError(f"the first of {data} can't be read: {batch.bad[0][0]} ({batch.bad[0][1]})")
        return batch.images.first(CHECKED)
    except DataError as error:
        hint = "" if data else "; give others with --data DIR"
        raise DataError(f"ONNX is checked on real images, and there are none: {error}{hint}") from None


def write_onnx(run: Run, encoder: nn.Module, out: Path, images: ImageSet) -> float:
    """Write the graph, with any number of images a batch, and return its largest difference from torch."""
    view, everyone = run.transform(), torch.arange(len(images))
    parts = [view(pixels, positions, sizes)[0] for positions, pixels, sizes in images.iter_chunks(everyone)]
    x = torch.cat(parts).contiguous()
    with atomic_path(out) as place:
        _to_onnx(encoder, x[:2], place)
        difference = max(_difference(encoder, place, batch) for batch in (x, x[:1]))
        if not difference <= TOLERANCE:
            raise NumbersError(
                f"the ONNX file differs from torch by {difference:.3g} on {len(x)} images, over {TOLERANCE:g}: "
                "not written; export to safetensors instead"
            )
    return difference


def _to_onnx(encoder: nn.Module, x: Tensor, path: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise EnvironmentFault(f"ONNX needs {error.name}: pip install onnx onnxscript onnxruntime") from None
    shapes = ({0: torch.export.Dim("images", min=1)},)
    with quiet(), foreign("torch can't write this encoder as ONNX"):
        # Strict: the other way takes len(x) for a constant and the batch with it.
        program = torch.export.export(encoder, (x,), dynamic_shapes=shapes, strict=True)
        torch.onnx.export(
            program, (x,), str(path), dynamo=True, external_data=False, verbose=False,
            input_names=["images"], output_names=["features"],
        )  # fmt: skip


def _difference(encoder: nn.Module, path: Path, x: Tensor) -> float:
    """The largest absolute difference; NaN where either gives one, which no tolerance admits."""
    import onnxruntime

    with torch.inference_mode():
        wanted = encoder(x)
    with foreign("onnxruntime can't run the file"):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        given = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    return (given - wanted).abs().max().item()


@contextlib.contextmanager
def foreign(what: str) -> Iterator[None]:
    """Exporter and runtime raise kinds of their own by the dozen; a disk's refusal stays what it is."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        reason = f"{type(error).__name__}: {first[:200]}"
        raise NumbersError(f"{what} ({reason}): not written; export to safetensors instead") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporter speaks of its own progress and of torch's future; a command's output is its own."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
