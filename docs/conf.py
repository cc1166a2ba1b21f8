"""Settings of Sphinx. `docs/build.py` gathers the sources and runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import kontrast  # noqa: E402

project = "kontrast"
author = "The kontrast authors"
copyright = "2026, the kontrast authors"
version = release = kontrast.__version__
extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "builder.mathml",
    "builder.docstrings", "builder.playground",
]  # fmt: skip
html_math_renderer = "mathml"
default_role = "literal"  # docstrings mark code with single backticks
exclude_patterns = ["_build"]
smartquotes = False  # quotes in docstrings are often code
strip_signature_backslash = True  # lets napoleon escape names that end with an underscore
toc_object_entries = False

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "attrs_block", "attrs_inline", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_in_temp = True  # what a tutorial writes does not stay among the sources
nb_execution_timeout = 300
nb_execution_cache_path = os.environ["KONTRAST_DOCS_CACHE"]
nb_merge_streams = True
nb_render_markdown_format = "myst"

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Shape", "notes_style")]
nitpick_ignore_regex = [("py:.*", r".*")]  # types of other libraries, whose documentation is on other hosts

html_theme = "pydata_sphinx_theme"
html_title = "kontrast"
html_context = {"default_mode": "auto"}  # the theme of the reader's system
html_static_path = [str(DOCS / "_static")]
templates_path = [str(DOCS / "_templates")]
html_css_files = ["kontrast.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # a page of a file system can't fetch the pages that were found
html_favicon = str(DOCS / "_static" / "mark.svg")
html_theme_options = {
    "logo": {"image_light": "_static/mark.svg", "image_dark": "_static/mark.svg", "text": "kontrast"},
    "navbar_align": "left",
    "navbar_end": ["versions", "theme-switcher"],
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "friendly",
    "pygments_dark_style": "github-dark",
}
html_sidebars = {"index": [], "changelog": []}
