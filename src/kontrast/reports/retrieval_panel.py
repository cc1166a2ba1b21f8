"""Turn retrieval.json into what the page shows: texts with the images that they find, and recall by K."""

from __future__ import annotations

from typing import Any

from kontrast.reports.run_files import ReportedRun, shorten

DIRECTIONS = {"image_to_text": "image to text", "text_to_image": "text to image"}
NOTE = (
    "The share of queries with a right answer among the first K. An image may find any of its captions; ties count "
    "against the model."
)


def retrieval_panel(run: ReportedRun, address: str) -> dict[str, Any]:
    """Return the panel of a run.

    Args:
        run: which has a retrieval.json.
        address: of the sprite with the pictures.
    """
    found = run.retrieval or {}
    queries = [
        {
            "name": shorten(str(query.get("name", ""))),
            "tile": query["tile"],
            "rank": query["rank"],
            "hits": [
                {
                    "name": shorten(str(hit.get("name", ""))),
                    "tile": hit["tile"],
                    "similarity": hit["similarity"],
                    "right": bool(hit.get("right")),
                }
                for hit in query["hits"]
            ],
        }
        for query in found["queries"]
    ]
    series = [
        {
            "name": title,
            "run": 0,
            "x": [point["k"] for point in found["curve"]],
            "y": [point[key] for point in found["curve"]],
        }
        for key, title in DIRECTIONS.items()
    ]
    plot = {
        "id": "retrieval",
        "title": "How often is a right answer among the first K?",
        "note": NOTE,
        "kind": "line",
        "x": {"label": "K", "zero": False, "whole": True},
        "y": {"label": "recall", "format": "percent", "log": False, "zero": True},
        "series": series,
    }
    sizes = {key: found[key] for key in ("tile", "columns")}
    count = found.get("images")
    return {
        **sizes,
        "images": count if isinstance(count, int) else 0,
        "sprite": address,
        "queries": queries,
        "plot": plot,
    }
