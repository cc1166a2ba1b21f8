"""Index clustered vectors, and measure recall, time per query and memory beside exact search.

    python benchmarks/search.py [--rows 10000000] [--width 128] [--noise decaying] [--folder DIR] [--table FILE]

The vectors are drawn around 20,000 centers of very unequal weight; the queries are further draws, which are not in the
file. With "decaying" noise the variance of the k-th axis is proportional to 1/k, as the spectra of learned features
decay; "isotropic" noise fills all axes alike, so that inside a large cluster nothing is near to anything.
Each query is searched alone, as `kontrast neighbors` does. Everything is written to a temporary folder and removed.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import kontrast
from kontrast.probes import nearest_rows
from kontrast.runs.index import recall_of
from kontrast.runs.vector_index import open_index

CENTERS, NOISE, CHUNK = 20_000, 0.6, 100_000
QUERIES, EXACT, K = 1000, 100, 10


def draw(
    generator: np.random.Generator, centers: np.ndarray, shares: np.ndarray, axes: np.ndarray, count: int
) -> np.ndarray:
    """Unit vectors [count, width] around centers; the noise is NOISE as long as the center, with deviations `axes`."""
    chosen = centers[generator.choice(len(centers), count, p=shares)]
    vectors = chosen + generator.standard_normal((count, centers.shape[1]), dtype=np.float32) * axes
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write_vectors(path: Path, rows: int, width: int, noise: str) -> np.ndarray:
    """Write the file of vectors and return the queries."""
    generator = np.random.default_rng(0)
    centers = generator.standard_normal((min(CENTERS, rows // 50), width), dtype=np.float32)
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    shares = generator.pareto(1.5, len(centers)) + 0.2
    shares /= shares.sum()
    variances = np.ones(width) if noise == "isotropic" else 1 / np.arange(1, width + 1)
    axes = (NOISE * np.sqrt(variances / variances.sum())).astype(np.float32)
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, width))
    for start in range(0, rows, CHUNK):
        out[start : start + CHUNK] = draw(generator, centers, shares, axes, min(CHUNK, rows - start))
    out.flush()
    return draw(generator, centers, shares, axes, QUERIES)


def anonymous_memory() -> int:
    """The most bytes of this process that are not pages of files. Pages of mapped files can be dropped at any time."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--noise", choices=("decaying", "isotropic"), default="decaying")
    parser.add_argument("--folder", type=Path, help="default: a temporary folder")
    parser.add_argument("--table", type=Path, help="append the table to this Markdown file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    place, most = Path(tempfile.mkdtemp(dir=options.folder)), 0
    try:
        queries = torch.from_numpy(write_vectors(place / "vectors.npy", options.rows, options.width, options.noise))
        before, start = anonymous_memory(), time.perf_counter()

        import threading

        done = threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(0.2):
                most = max(most, anonymous_memory())

        threading.Thread(target=watch, daemon=True).start()
        result = kontrast.index(place / "vectors.npy", place / "index")
        done.set()
        built = time.perf_counter() - start
        print(result, flush=True)
        index = open_index(place / "index")
        for query in queries[:200]:
            index.search(query[None], K)
        times = []
        found = []
        for query in queries:
            start = time.perf_counter()
            found.append(index.search(query[None], K)[1])
            times.append(1e3 * (time.perf_counter() - start))
        exact = nearest_rows(queries[:EXACT], index.file, K)[1]
        recall = recall_of(torch.cat(found[:EXACT]), exact)
        start = time.perf_counter()
        nearest_rows(queries[:1], index.file, K)
        alone = time.perf_counter() - start
    finally:
        shutil.rmtree(place)
    facts, peak = result.facts, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    probes, share = facts["probes"], f"{facts['bytes'] / facts['rows']:.0f}"
    lines = [
        f"| search among {options.rows:,} vectors of {options.width} | recall@{K} "
        "| ms a query, median | 95th percentile |",
        "| --- | ---: | ---: | ---: |",
        f"| index, {facts['kind']}, {probes} of {facts['centroids']:,} lists | {recall:.3f} | {np.median(times):.2f} "
        f"| {np.percentile(times, 95):.2f} |",
        f"| exact | 1.000 | {1e3 * alone:,.0f} | |",
        "",
        f"Built in {built / 60:.1f} minutes on one core that was shared with other work, with at most "
        f"{(most - before) / 1e9:.2f} GB of memory beside the pages of mapped files (peak resident set with them: "
        f"{peak / 1e9:.1f} GB); {facts['bytes'] / 1e9:.2f} GB on disk, {share} bytes per vector. Recall is of {EXACT} "
        f"queries, time of {QUERIES}.",
    ]
    print("\n".join(lines))
    if options.table:
        command = f"python benchmarks/search.py --rows {options.rows} --width {options.width} --noise {options.noise}"
        head = "" if options.table.exists() else "# Search over many vectors\n"
        head += f"\nWritten by `{command}` ({time.strftime('%Y-%m-%d')}; one thread)."
        with open(options.table, "a") as file:
            file.write(head + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
