"""Checks of a built site: links and anchors, headings, pictures, the size of each page, requests to other hosts."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGEST_PAGE = 1_000_000
"""Bytes of a page with everything that a browser loads to show it."""
LOADED = {
    "img": "src",
    "script": "src",
    "source": "src",
    "iframe": "src",
    "video": "src",
    "audio": "src",
    "image": "href",
}
LOADED_LINKS = {"stylesheet", "icon", "shortcut icon", "preload", "modulepreload"}


class Page(HTMLParser):
    """The links, anchors, loaded files, headings and pictures of an HTML page.

    Args:
        text: the HTML.
    """

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.titles = 0
        self.unnamed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.titles += tag == "h1"
        if tag == "img" and "alt" not in given:
            self.unnamed.append(given.get("src", ""))
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "name" in given:
            self.anchors.add(given["name"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and given.get(LOADED[tag]):
            self.loaded.append(given[LOADED[tag]])
        if tag == "link" and given.get("rel") in LOADED_LINKS:
            self.loaded.append(given["href"])


def check_site(pages: Path) -> list[str]:
    """Return what is wrong with the pages below a folder, one line each.

    Args:
        pages: The folder of one version.
    """
    parsed = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(pages.rglob("*.html"))}
    problems = []
    for path, page in parsed.items():
        name = path.relative_to(pages.resolve())
        problems += [f"{name}: broken link {link}" for link in page.links if not reachable(link, path, parsed)]
        problems += [f"{name}: the picture {source} has no alt text" for source in page.unnamed]
        if page.titles != 1:
            problems.append(f"{name}: {page.titles} headings of the first level; give one")
        problems += [f"{name}: requests another host: {url}" for url in page.loaded if urlsplit(url).netloc]
        local = [url for url in page.loaded if not urlsplit(url).netloc and not url.startswith("data:")]
        problems += [f"{name}: loads {url}, which does not exist" for url in local if not resolve(url, path).is_file()]
        size = page_size(path, local)
        if size > LARGEST_PAGE:
            problems.append(f"{name}: {size:,} bytes with all it loads; at most {LARGEST_PAGE:,} are allowed")
    return problems


def resolve(url: str, page: Path) -> Path:
    return (page.parent / unquote(urlsplit(url).path)).resolve()


def reachable(link: str, page: Path, parsed: dict[Path, Page]) -> bool:
    """Say whether a link leads to a file of the site, and to an anchor that is there. Other hosts are not asked."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return parts.scheme in ("https", "http", "mailto", "data")
    target = resolve(link, page) if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return False
    if not parts.fragment or target not in parsed:
        return True
    return unquote(parts.fragment) in parsed[target].anchors


def page_size(page: Path, loaded: list[str]) -> int:
    """Return the bytes of a page and of the files that it loads, each counted once."""
    files = {page, *(resolve(url, page) for url in loaded)}
    return sum(path.stat().st_size for path in files if path.is_file())
