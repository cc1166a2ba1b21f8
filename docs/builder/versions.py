"""The root of the site: the list of versions for the menu, and a page that leads to the newest."""

from __future__ import annotations

import json
import re
from pathlib import Path

REDIRECT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>kontrast</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
</head>
<body><p><a href="{newest}/index.html">The documentation of kontrast {newest}</a></p></body>
</html>
"""


def write_versions(site: Path, built: str) -> None:
    """Write `versions.js` and `index.html` for all versions whose folders are in the site.

    Args:
        site: The folder that has one folder per version.
        built: The version that was built just now.
    """
    names = {built, *(p.name for p in site.iterdir() if (p / "index.html").is_file())}
    versions = sorted(names, key=version_order, reverse=True)
    newest = versions[0]
    entries = [{"name": f"{name} (newest)" if name == newest else name, "version": name} for name in versions]
    text = f"window.kontrastVersions = {json.dumps(entries, indent=2)};\n"  # a script, because pages can't fetch files
    (site / "versions.js").write_text(text, encoding="utf-8")
    (site / "index.html").write_text(REDIRECT.format(newest=newest), encoding="utf-8")


def version_order(name: str) -> tuple[tuple[int, ...], bool]:
    """Order 0.10.0 after 0.9.0, and a release after what was built before it (0.9.0.dev1)."""
    numbers = re.match(r"\d+(\.\d+)*", name)
    release = tuple(int(part) for part in numbers[0].split(".")) if numbers else ()
    return release, bool(numbers) and numbers[0] == name
