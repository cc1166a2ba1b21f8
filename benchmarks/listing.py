"""Measure what the list of a large folder costs: bytes per image, seconds to list and to start again, memory of ranks.

    python benchmarks/listing.py [--images 10000,100000,1000000] [--folder DIR] [--json FILE] [--table FILE]

It makes folders of hard links (1,000 per class folder) in a temporary folder, lists each in a fresh process, starts
again in one and in four processes, and removes everything. Memory is what the processes hold beyond their state before
the folder was opened: proportional set sizes (pages that ranks share are counted once), and the peak of the resident
set of the first start.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PER_FOLDER = 1000
LINKS = 60_000
"""Hard links to one file; ext4 allows 65,000."""
TARGET = 10**8


def make_links(root: Path, count: int) -> None:
    """Hard links to one-pixel images, 1,000 per folder, with names like those of ImageNet."""
    from PIL import Image

    originals = root.with_name("originals")
    originals.mkdir(parents=True)
    for number in range(-(-count // LINKS)):
        Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(originals / f"{number}.png")
    for folder in range(-(-count // PER_FOLDER)):
        place = root / f"n{folder:08d}"
        place.mkdir(parents=True)
        for number in range(folder * PER_FOLDER, min(count, (folder + 1) * PER_FOLDER)):
            os.link(originals / f"{number // LINKS}.png", place / f"n{folder:08d}_{number:08d}.png")


def memory() -> dict[str, int]:
    """Bytes of this process: its share of all resident pages, what is private to it, and its peak so far."""
    text = Path("/proc/self/smaps_rollup").read_text() + Path("/proc/self/status").read_text()
    found = dict.fromkeys(("Pss", "Private_Clean", "Private_Dirty", "VmHWM"), 0)
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key in found:
            found[key] = 1024 * int(value.split()[0])
    return found


def rank(root: str, verify: bool) -> None:
    """One rank: open the folder, read all its columns, and print seconds and bytes. Waits for a line on stdin."""
    from kontrast.data import open_data, sources
    from kontrast.data.lazy_images import LazyImages

    sources._free_memory = lambda: 0  # the pixels of real images don't fit into memory; those of the links would
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before, start = memory(), time.perf_counter()
    images = open_data(root, "train", pack=False, verify=verify)
    assert isinstance(images.images, LazyImages)
    assert len(images.names) == len(images) and images.names[len(images) // 2]
    seconds, opened = time.perf_counter() - start, memory()
    columns, rows = images.images.items.columns, images.images.items.rows
    arrays = [columns.folder, columns.first, columns.second, columns.base.ends, images.labels.numpy(), rows]
    touched = sum(int(array.sum() > 0) for array in arrays) + int(columns.base.text.sum() > 0)  # all pages are resident
    held = sum(array.nbytes for array in arrays)
    print(json.dumps({"seconds": seconds, "peak": opened["VmHWM"] - before["VmHWM"], "touched": touched}), flush=True)
    sys.stdin.readline()  # all ranks hold their columns now
    after = memory()
    private = sum(after[key] - before[key] for key in ("Private_Clean", "Private_Dirty"))
    facts = {"pss": after["Pss"] - before["Pss"], "private": private, "held": held, "text": columns.base.text.nbytes}
    facts |= {"images": len(columns.folder), "train": len(images)}
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()


def run_ranks(root: Path, count: int, verify: bool = False) -> list[dict[str, float]]:
    """Open the folder in `count` processes at the same time and return what each of them measured."""
    command = [sys.executable, __file__, "--rank", str(root), *(["--verify"] if verify else [])]
    ranks = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    found: list[dict[str, float]] = [{} for _ in ranks]
    for _ in range(2):
        for one, process in zip(found, ranks):
            assert process.stdout is not None
            one.update(json.loads(process.stdout.readline()))
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
    for process in ranks:
        process.communicate()
    return found


def measure(place: Path, count: int) -> dict[str, float]:
    root = place / "images"
    start = time.perf_counter()
    make_links(root, count)
    made = time.perf_counter() - start
    time.sleep(3)  # a folder that changed in the last two seconds is listed again
    os.environ["KONTRAST_CACHE"] = str(place / "cache")
    first = run_ranks(root, 1)[0]
    again = run_ranks(root, 1)[0]
    verified = run_ranks(root, 1, verify=True)[0]
    four = run_ranks(root, 4)
    stored = sum(path.stat().st_size for path in (place / "cache").rglob("*") if path.is_file())
    return {
        "images": first["images"], "make_s": made, "list_s": first["seconds"], "again_s": again["seconds"],
        "verify_s": verified["seconds"], "peak_first": first["peak"], "pss_1": again["pss"],
        "pss_4": sum(one["pss"] for one in four), "private_4": sum(one["private"] for one in four),
        "columns": again["held"] / again["images"], "text": again["text"] / again["images"],
        "stored": stored / first["images"],
    }  # fmt: skip


def table(rows: list[dict[str, float]]) -> str:
    """The table, with the extrapolation of its last row to 10^8 images."""
    lines = [
        "| images | columns, bytes per image | names | list, s | start again, s | with every file compared, s "
        "| peak of the first start, MB | 1 rank, MB | 4 ranks, MB | of these private, MB |",
        "| ---: " * 10 + "|",
    ]
    for row in rows:
        mega = [f"{row[key] / 1e6:,.1f}" for key in ("peak_first", "pss_1", "pss_4", "private_4")]
        seconds = [f"{row[key]:,.2f}" for key in ("list_s", "again_s", "verify_s")]
        cells = [f"{row['images']:,.0f}", f"{row['columns']:.1f}", f"{row['text']:.1f}", *seconds, *mega]
        lines.append(f"| {' | '.join(cells)} |")
    last = rows[-1]
    factor = TARGET / last["images"]
    lines += [
        "",
        f"Extrapolated to 10^8 images, each figure of the last row x {factor:,.0f}: "
        f"{last['columns']:.1f} bytes x 10^8 = {last['columns'] / 10:.1f} GB of columns and {last['text'] / 10:.1f} GB "
        f"of names, mapped once per host; {last['list_s'] * factor / 60:,.0f} minutes to list, "
        f"{last['again_s'] * factor:,.1f} s to start again, {last['verify_s'] * factor / 60:,.0f} minutes with every "
        f"file compared at once; 4 ranks hold {last['pss_4'] * factor / 1e9:.1f} GB together.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", default="10000,100000,1000000", help="numbers of images, ascending")
    parser.add_argument("--folder", type=Path, help="where the links are made; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--verify", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.verify)
        return
    rows = []
    for count in map(int, options.images.split(",")):
        place = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            rows.append(measure(place, count))
        finally:
            shutil.rmtree(place)
        print(json.dumps(rows[-1]), flush=True)
    text = table(rows)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.table:
        command = f"python benchmarks/listing.py --images {options.images}"
        facts = f"{time.strftime('%Y-%m-%d')}; {os.cpu_count()} CPU cores"
        head = f"# The list of a large folder\n\nWritten by `{command}` ({facts})."
        options.table.write_text(f"{head}\n\n{text}\n")


if __name__ == "__main__":
    main()
