"""The command `pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kontrast.cli.output import FloatRange, FollowLinks, Json, MaxBad, emit, two_numbers


def pack(
    data: Annotated[str, typer.Argument(help="A folder, a named data set or shards.")],
    out: Annotated[Path, typer.Argument(help="The store to write.")],
    size: Annotated[int, typer.Option(help="Shrink the shorter side to this many pixels; 0 keeps every size.")] = 0,
    max_bad: MaxBad = None,
    float_range: FloatRange = "",
    follow_links: FollowLinks = False,
    captions: Annotated[str, typer.Option(help="Keep captions: auto, or a file of captions in DATA.")] = "",
    depth: Annotated[str, typer.Option(help="own keeps 16 bits, floats and all channels; 8-bit; or auto.")] = "auto",
    files: Annotated[str, typer.Option(help="Which files: auto, pictures, arrays, dicom or video.")] = "auto",
    every: Annotated[float, typer.Option(help="Seconds between two frames of a video.")] = 1.0,
    layout: Annotated[str, typer.Option(help="Axes of arrays: auto, HWC or CHW.")] = "auto",
    pages: Annotated[str, typer.Option(help="Pages of TIFF files: first, or channels.")] = "first",
    as_json: Json = False,
) -> None:
    """Decode DATA once into a memory-mapped store.

    Commands open the store instantly, however many images it has.
    """
    from kontrast.data import open_data
    from kontrast.data.pack import pack as write_store
    from kontrast.training.progress import PackingBar

    options: dict[str, Any] = {"follow_links": follow_links, "float_range": two_numbers(float_range)}
    options |= {"captions": captions, "depth": depth, "files": files, "every": every, "layout": layout, "pages": pages}
    if max_bad is not None:
        options["max_bad"] = max_bad
    with PackingBar("pack") as bar:
        stores = write_store(data, out, size=size or None, progress=bar, **options)
    splits = {path.name: open_data(out, path.name) for path in stores}
    facts = {name: {"images": len(split), "skipped": len(split.bad)} for name, split in splits.items()}
    lines = [f"{name:<6} {f['images']:>9,} images, {f['skipped']} skipped" for name, f in facts.items()]
    emit({"store": str(out), "parts": facts}, [*lines, f"store  {out}"], as_json)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(pack)
