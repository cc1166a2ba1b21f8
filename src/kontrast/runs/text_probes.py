"""Probe a run with a text tower: zero-shot classification and retrieval, beside the untrained towers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kontrast.data import ImageSet
from kontrast.data.captioned_digits import COMBINATIONS
from kontrast.errors import DataError
from kontrast.files import write_atomic
from kontrast.lens.gallery import COLUMNS, TILE, Tiles
from kontrast.probes import ProbeResult
from kontrast.probes.retrieval import KS, Ranks, retrieval, retrieval_ranks
from kontrast.probes.zero_shot import class_vectors, templates_named, zero_shot
from kontrast.runs.run import Run
from kontrast.runs.towers import Towers
from kontrast.training.progress import Progress
from kontrast.training.run_folder import sha256

ZERO_SHOT, RETRIEVAL = "zero-shot", "retrieval"
TEXT_PROBES = (ZERO_SHOT, RETRIEVAL)
TEXT_RESULTS = {
    ZERO_SHOT: (ZERO_SHOT, "zero-shot-unseen", "zero-shot-unseen-pairs"),
    RETRIEVAL: tuple(f"{direction}-r{k}" for direction in ("image-to-text", "text-to-image") for k in KS),
}
"""The names of the results of each probe."""
QUERIES, HITS = 8, 5
SHOWN_LENGTH = 200


def text_results(
    towers: Towers, kinds: Sequence[str], test: ImageSet, templates: str | Sequence[str] = "",
    advance: Callable[[int], None] | None = None, seed: int = 0,
) -> tuple[list[ProbeResult], dict[str, Any]]:  # fmt: skip
    """Return the results of zero-shot classification and of retrieval on test images.

    Args:
        towers: of the run.
        kinds: which of `TEXT_PROBES`.
        test: the images, with labels for zero-shot classification and captions for retrieval.
        templates: of zero-shot classification; default: those of the recipe.
        advance: called with the number of images of each batch.
        seed: of the intervals.

    Returns:
        The results, and the queries, hits and curve of the retrieval for the report; empty without retrieval.
    """
    vectors, results, shown = towers.images(test, advance), [], {}
    if ZERO_SHOT in kinds:
        results += zero_shot_results(towers, vectors, test, templates, seed)
    if RETRIEVAL in kinds:
        if test.captions is None:
            raise DataError(f"{test.name} has no captions, which retrieval needs")
        texts = towers.texts(test.captions.texts)
        ids, starts = torch.from_numpy(test.captions.ids), torch.from_numpy(test.captions.starts)
        vectors, texts = vectors.to(towers.device), texts.to(towers.device)
        ranks = retrieval_ranks(vectors, texts, ids, starts)
        results += retrieval(ranks, seed)
        shown = examples(ranks, vectors, texts, test)
    return results, shown


def zero_shot_results(
    towers: Towers, vectors: Tensor, test: ImageSet, templates: str | Sequence[str], seed: int
) -> list[ProbeResult]:
    """Return the zero-shot accuracy on all test images, and on those whose combination of factors is unseen."""
    if test.labels is None or not test.classes:
        raise DataError(f"{test.name} has no classes, which zero-shot classification needs: give class sub-folders")
    text = towers.run.recipe.text
    assert text is not None
    chosen = templates_named(templates or text.templates)
    classes = class_vectors(lambda texts: towers.texts(texts), test.classes, chosen)
    protocol = {"templates": list(chosen) if len(chosen) <= 20 else f"{len(chosen)} templates"}

    def measured(name: str, rows: Tensor, labels: Tensor, vectors_of_classes: Tensor, names: Sequence[str]):
        found = zero_shot(vectors[rows], labels[rows], vectors_of_classes, seed)
        per_class = [{"class": names[row["label"]], **row} for row in found.per_class]
        return dataclasses.replace(found, probe=name, protocol={**found.protocol, **protocol}, per_class=per_class)

    everything = torch.arange(len(test))
    results = [measured(ZERO_SHOT, everything, test.labels, classes, test.classes)]
    if "unseen" in test.factors and bool(test.factors["unseen"].any()):
        unseen = torch.nonzero(test.factors["unseen"])[:, 0]
        results.append(measured("zero-shot-unseen", unseen, test.labels, classes, test.classes))
        pairs = class_vectors(lambda texts: towers.texts(texts), COMBINATIONS, ["a {}"])
        combination = test.factors["combination"]
        results.append(measured("zero-shot-unseen-pairs", unseen, combination, pairs, COMBINATIONS))
    return results


def examples(ranks: Ranks, images: Tensor, texts: Tensor, test: ImageSet) -> dict[str, Any]:
    """Return what the report shows of a retrieval: its curve, and some captions with the images that they find.

    The captions are the first ones of images that are evenly spaced over the test set, not the best ones.
    """
    captions = test.captions
    assert captions is not None
    queries = []
    for image in sorted({number * len(test) // QUERIES for number in range(QUERIES)}):
        caption = int(captions.starts[image])
        text = int(captions.ids[caption])
        cosines, hits = (images @ texts[text]).topk(min(HITS, len(images)))
        right = [text in captions.ids[captions.starts[hit] : captions.starts[hit + 1]] for hit in hits.tolist()]
        rows = zip(hits.tolist(), cosines.tolist(), right)
        found = [{"image": hit, "similarity": round(cosine, 4), "right": bool(ok)} for hit, cosine, ok in rows]
        query = {"name": captions.texts[text][:SHOWN_LENGTH], "rank": int(ranks.to_image[caption])}
        queries.append({**query, "image": image, "hits": found})
    curve = [{"k": k, "image_to_text": a, "text_to_image": b} for k, a, b in ranks.curve()]
    return {"version": 1, "images": len(test), "captions": len(captions.ids), "curve": curve, "queries": queries}


def write_examples(folder: Path, shown: dict[str, Any], test: ImageSet) -> None:
    """Write retrieval.json and retrieval.png, the thumbnails of the images that queries belong to and find."""
    tiles = Tiles()

    def with_tile(entry: dict[str, Any]) -> dict[str, Any]:
        number = entry["image"]
        named = {"name": str(test.names[number]), **entry}  # a query's name is its text
        return {**named, "tile": tiles.add("test", test.pictures, number)}

    queries = [{**with_tile(query), "hits": [with_tile(hit) for hit in query["hits"]]} for query in shown["queries"]]
    sprite = tiles.sprite()
    facts = {"tile": TILE, "columns": COLUMNS, "count": len(tiles.pictures)}
    tree = {**shown, "queries": queries, **facts, "sprite_sha256": sha256(sprite)}
    write_atomic(folder / "retrieval.png", sprite)
    write_atomic(folder / "retrieval.json", json.dumps(tree, allow_nan=False).encode("ascii"))


def probe_towers(
    run: Run, kinds: tuple[str, ...], test: ImageSet, templates: str | Sequence[str], device: torch.device, shown: bool
) -> list[ProbeResult]:
    """Probe the trained and the untrained towers; `shown` writes what the report shows of the retrieval."""
    results: list[ProbeResult] = []
    with Progress(" and ".join(kinds), 2 * len(test)) as bar:
        for features in ("trained", "untrained"):
            towers = Towers(run, device, trained=features == "trained")
            found, queries = text_results(towers, kinds, test, templates, bar.advance, run.recipe.seed)
            results += [dataclasses.replace(one, features=features) for one in found]
            if queries and shown and features == "trained":
                write_examples(run.path, queries, run.shown(test))
    return results
