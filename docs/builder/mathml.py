"""A math renderer for Sphinx that writes MathML, which browsers typeset without any script or font of ours."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

WORD = re.compile(r"\\mathrm\{(\w\w+)\}")


def to_mathml(latex: str, display: str = "inline") -> str:
    """Return an equation as a MathML element.

    Args:
        latex: The equation, without dollar signs.
        display: "inline" or "block".
    """
    whole_words = WORD.sub(r"\\operatorname{\1}", latex.strip())  # one element per word instead of one per letter
    return convert(whole_words, display=display)


def visit_inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(to_mathml(node.astext()))
    raise nodes.SkipNode


def visit_block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="equation">{to_mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
