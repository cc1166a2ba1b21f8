"""Gather the pages of the site from docs/, results/ and the root of the repository, with links that fit the site.

Pages link to each other by their paths in the repository, so that they can be read there too. In the site `docs/` is
the root, README.md of a folder is its index, and files that are not part of the site are named instead of linked.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

LINK = re.compile(r"(?P<bang>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^\s*(```+|~~~+|:::+)")
FOLDERS = {"docs": "", "results": "results"}
"""Folders of the repository and where they are in the site."""
FILES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
NOT_PAGES = {"builder", "_static", "_templates", "__pycache__", "build.py", "conf.py"}
LINKED = {".md", ".json", ".jsonl", ".log", ".svg", ".png", ".toml", ".csv", ".html"}


def site_path(path: Path) -> Path | None:
    """Return where a file or folder of the repository is in the site, or None if it is not part of it.

    Args:
        path: A path relative to the root of the repository.
    """
    if path.as_posix() in FILES:
        return Path(FILES[path.as_posix()])
    top, *rest = path.parts or ("",)
    if top not in FOLDERS or (top == "docs" and rest and rest[0] in NOT_PAGES):
        return None
    if rest and "." in rest[-1] and path.suffix not in LINKED:
        return None
    if path.name == "README.md":
        rest[-1] = "index.md"
    return Path(FOLDERS[top], *rest)


def stage(root: Path, sources: Path) -> None:
    """Copy every page and the files that pages use into a new folder `sources`, and rewrite the links."""
    shutil.rmtree(sources, ignore_errors=True)
    for path in sorted(files_of(root)):
        place = site_path(path)
        if place is None:
            continue
        target = sources / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(rewrite_links((root / path).read_text(encoding="utf-8"), root, path), encoding="utf-8")
        else:
            shutil.copyfile(root / path, target)


def files_of(root: Path) -> list[Path]:
    """Return the files of the folders and the single files that the site is made of, relative to the root."""
    found = [p.relative_to(root) for folder in FOLDERS for p in (root / folder).rglob("*") if p.is_file()]
    return [*found, *(Path(name) for name in FILES)]


def rewrite_links(text: str, root: Path, page: Path) -> str:
    """Return the text of a page with links to other files as they have to be in the site."""
    place = site_path(page)
    assert place is not None
    lines, fence = [], ""
    for line in text.splitlines():
        opened = FENCE.match(line)
        if opened and opened[1][0] in "`~" and (not fence or line.strip() == fence):
            fence = "" if fence else opened[1]
        lines.append(line if fence else LINK.sub(lambda m: rewrite_link(m, root, page, place), line))
    return "\n".join(lines) + "\n"


def rewrite_link(match: re.Match[str], root: Path, page: Path, place: Path) -> str:
    target, _, anchor = match["target"].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return match[0]
    file = Path(os.path.normpath(page.parent / target))
    new = site_path(file)
    folder = (root / file).is_dir()
    if new is None or (folder and not any((root / file / name).is_file() for name in ("README.md", "index.md"))):
        text = match["text"]
        return text if "`" in text else f"`{text}`"
    if folder:
        new = new / "index.md"
    relative = Path(os.path.relpath(new, place.parent)).as_posix()
    return f"{match['bang']}[{match['text']}]({relative}{'#' + anchor if anchor else ''})"
