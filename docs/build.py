"""Build the documentation site into one folder, and check it.

    uv run --group docs python docs/build.py                 # writes site/, with a folder per version
    uv run --group docs python docs/build.py --out DIR       # another folder

The folder is made of plain files: open site/index.html, or put it under any path of a web server. Warnings, failing
tutorials, broken links, pages of more than 1 MB and requests to other hosts end the build with an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from builder.checks import check_site
from builder.notebook_environment import notebook_environment
from builder.pages import write_generated_pages
from builder.sources import stage
from builder.versions import write_versions

from kontrast import __version__

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("*.map", "webpack-macros.html", ".buildinfo", "_sources")
"""Files that Sphinx and the theme write and that no page loads."""


def build(out: Path, work: Path, *, fresh: bool = False) -> list[str]:
    """Build the site of this version below `out`, and return what is wrong with it.

    Args:
        out: The site: one folder per version, `versions.js`, and `index.html`, which leads to the newest version.
        work: Where the sources are gathered and where the outputs of the tutorials are kept between builds.
        fresh: Forget the kept outputs and execute every tutorial again.
    """
    if fresh:
        shutil.rmtree(work, ignore_errors=True)
    sources = work / "sources"
    stage(ROOT, sources)
    write_generated_pages(ROOT, sources)
    html, pages = work / "html", out / __version__
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-n", "-q", "-c", ROOT / "docs"]
    shutil.rmtree(html, ignore_errors=True)
    given = {**os.environ, **notebook_environment(), "KONTRAST_DOCS_CACHE": str(work / "executed")}
    if subprocess.run([*command, "-d", work / "doctrees", sources, html], env=given, check=False).returncode:
        return ["Sphinx reported the warnings above"]
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(html, pages, ignore=shutil.ignore_patterns(*LEFT_OUT))
    write_versions(out, __version__)
    return check_site(pages)


def executed_pages(work: Path) -> dict[str, float]:
    """Return the seconds on the clock that the cells of each tutorial took when they were executed."""
    from jupyter_cache import get_cache

    records = get_cache(work / "executed").list_cache_records()
    records = sorted(records, key=lambda one: (one.uri, one.created))  # a page that was changed has several
    return {Path(one.uri).stem: one.data["execution_seconds"] for one in records}


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site and check it.")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="the folder of the site (default: site/)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "docs", help="sources and kept outputs")
    parser.add_argument("--fresh", action="store_true", help="execute every tutorial again")
    arguments = parser.parse_args()
    start = time.perf_counter()
    problems = build(arguments.out.resolve(), arguments.work.resolve(), fresh=arguments.fresh)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        for page, seconds in executed_pages(arguments.work.resolve()).items():
            print(f"{page}: executed in {seconds:.1f} s")
        print(f"{arguments.out / 'index.html'}: built and checked in {time.perf_counter() - start:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
