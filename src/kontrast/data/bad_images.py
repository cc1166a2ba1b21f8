"""Images that can't be read: how many are allowed, and how they are reported."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from kontrast.data.listing import Listing
from kontrast.errors import DataError, printable

BadImages = Sequence[tuple[str, str]]
"""Names and reasons."""


def skipped(bad: BadImages, total: int, what: str = "images") -> str:
    """A line that says how many images were skipped and names the first of them."""
    shown = ", ".join(f"{printable(name)} ({reason})" for name, reason in bad[:3])
    return f"skipped {len(bad)} of {total} {what}: {shown}{' ...' if len(bad) > 3 else ''}"


def check_bad(bad: BadImages, total: int, max_bad: float, where: str) -> None:
    """Raise `DataError` if more than the share `max_bad` of all images is bad.

    Up to three times that share passes if no single reason accounts for more than the share: a few unrelated stray
    files in a small folder are harmless, many files that fail in the same way are not.
    """
    share, mixed = (int(times * max_bad * total + 1e-9) for times in (1, 3))  # 0.29 x 100 is 28.999...
    if len(bad) <= share:
        return
    reason, alike = Counter(_kind(reason) for _, reason in bad).most_common(1)[0]
    if len(bad) <= mixed and alike <= share:
        return
    if len(bad) == total:
        raise none_readable(bad, where)
    shown = "; ".join(f"{printable(name)} ({reason})" for name, reason in bad[:10])
    more = f"; and {len(bad) - 10} more" if len(bad) > 10 else ""
    enough = math.ceil(100 * len(bad) / total) / 100
    raise DataError(
        f"{len(bad)} of {total} images in {where} are bad, over the {max_bad:.0%} allowed ({share} images, "
        f"or {mixed} of mixed kinds; {alike} are '{reason}'): {shown}{more}. "
        f"Repair or remove them, or allow as many with --max-bad {enough:g} (in a recipe: data.max_bad={enough:g})"
    )


def check_listing(listing: Listing, bad: BadImages, max_bad: float) -> None:
    """Apply `check_bad` to the whole source of a listing: by chance, most bad images may be in the smaller split."""
    both = list(dict.fromkeys([*bad, *listing.other_bad]))
    check_bad(both, listing.source_total or len(listing.items) + len(listing.bad), max_bad, listing.root)


def none_readable(bad: BadImages, where: str) -> DataError:
    name, reason = bad[0]
    return DataError(f"none of the {len(bad)} images in {where} could be read: {printable(name)} ({reason}), ...")


def _kind(reason: str) -> str:
    """A reason without the numbers, quotes and brackets that differ from file to file."""
    return re.sub(r"\d+", "N", re.sub(r"\(.*\)|<.*>|'.*'|b'.*", "", reason)).strip()
